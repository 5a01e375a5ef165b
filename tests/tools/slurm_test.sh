#!/usr/bin/env bash
# A real Slurm on this machine (controller, daemon and munge, all of them the test's own, in a folder and on ports of
# its own) runs configs/slurm/train.sbatch with two CPU ranks: stopped by SIGUSR1 it saves, is requeued, goes on and
# ends; then the same under --mpi=pmix. Usage: slurm_test.sh TESSERA SOURCE_FOLDER. Exit 77: skipped, with a reason.
set -euo pipefail
tessera=$(realpath "$1")
source=$(realpath "$2")

skip() { echo "skipped: $*"; exit 77; }
[ "$(id -u)" = 0 ] || skip "only root may start slurmd"
for tool in slurmctld slurmd munged sbatch srun scontrol scancel; do
  command -v "$tool" >/dev/null || skip "$tool is not installed (packages slurmctld slurmd slurm-client munge)"
done

folder=$(mktemp -d /tmp/tessera-slurm-XXXXXX)
pids=()
finish() {
  code=$?
  if [ "$code" != 0 ]; then
    for log in "$folder"/job*.log "$folder"/ctld.log "$folder"/slurmd.log; do
      [ -e "$log" ] && { echo "== $log"; tail -n 40 "$log"; }
    done
  fi
  scancel -u root >/dev/null 2>&1 || true
  # Only what was started here, the daemon last: it ends its job's processes.
  for ((i = ${#pids[@]} - 1; i >= 0; --i)); do kill "${pids[$i]}" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do timeout 10 tail --pid="$pid" -f /dev/null || kill -9 "$pid" 2>/dev/null || true; done
  rm -rf "$folder"
  exit "$code"
}
trap finish EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
host=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf
mkdir "$folder/state" "$folder/spool"
cat >"$SLURM_CONF" <<CONF
ClusterName=tessera-test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired.
AuthInfo=socket=$folder/munge.sock,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/ctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/ctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=1
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF

head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 600 "$folder/munge.key"
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.sock" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" --num-threads=2 >/dev/null 2>&1 &
pids+=($!)
until_true() {  # seconds, command
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || { echo "gave up waiting for: $*"; exit 1; }
    sleep 0.2
  done
}
until_true 20 test -S "$folder/munge.sock"
slurmctld -D -f "$SLURM_CONF" >/dev/null 2>&1 &
pids+=($!)
slurmd -D -f "$SLURM_CONF" -N "$host" >/dev/null 2>&1 &
pids+=($!)
is_up() { sinfo -h -o %T | grep -qE 'idle|mixed'; }
until_true 30 is_up

cat >"$folder/run.yaml" <<RUN
run: {device: cpu, dir: $folder/run}
model: {path: $source/configs/models/quickstart.json, init: random}
train: {sequence_length: 64, micro_batch_size: 1, global_batch_size: 2, max_steps: 100000}
optimizer: {learning_rate: 1e-3}
parallel: {tensor: 2}
data: {train: ["synthetic:64x64"], packing: false, tokenizer: bytes}
RUN
submit() {  # log, more arguments of tessera
  local log=$1
  shift
  TESSERA=$tessera sbatch --parsable --nodes 1 --ntasks-per-node 2 --gpus-per-task 0 --cpus-per-task 1 --time 10 \
    --output "$log" "$source/configs/slurm/train.sbatch" "$folder/run.yaml" "$@"
}
steps() { grep -c '"kind":"train"' "$folder/run/metrics.jsonl"; }
has_steps() { [ "$(steps)" -ge "$1" ]; }
is_over() { [ -z "$(squeue -h -j "$1")" ]; }

echo "== stopped by SIGUSR1, requeued, goes on"
job=$(submit "$folder/job1.log")
until_true 60 has_steps 3
before=$(steps)
scancel --signal=USR1 "$job"
requeued() { grep -q "tessera ended with 75: job $job is requeued (restart 1)" "$folder/job1.log"; }
until_true 60 requeued
went_on() { has_steps $((before + 5)) && grep -q '^resume ' "$folder/job1.log"; }
until_true 90 went_on

echo "== a mistake is not requeued"
scancel "$job"
until_true 60 is_over "$job"
bad=$(submit "$folder/job2.log" --set parallel.tensor=3)
until_true 60 is_over "$bad"
grep -q 'error:' "$folder/job2.log"
! grep -q 'is requeued' "$folder/job2.log"

echo "== under --mpi=pmix, to its end"
last=$(($(steps) + 20))
export TESSERA_SRUN=--mpi=pmix
job=$(submit "$folder/job3.log" --set train.max_steps="$last")
until_true 90 is_over "$job"
grep -q '^final model in ' "$folder/job3.log"
! grep -q 'is requeued' "$folder/job3.log"
[ "$(tail -n 1 "$folder/run/metrics.jsonl" | python3 -c 'import json, sys; print(json.loads(sys.stdin.read())["step"])')" = "$last" ]
echo "passed"
