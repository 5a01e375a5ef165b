// The `data` section of a run: which files are trained on and how their records become rows.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/config.h"

namespace tessera {

// Records of one kind: a file, a folder, a glob pattern or "synthetic:ROWSxLENGTH".
struct DataSource {
  std::string path;
  std::string format = "auto";
  std::map<std::string, std::string> columns;  // our name -> the file's name: {text: content}
  std::optional<double> weight;
  std::optional<std::int64_t> max_rows;
  std::string labels = "auto";

  void visit(FieldVisitor& v) {
    v.field("path", path, "File, folder, glob pattern, or synthetic:ROWSxLENGTH (random tokens)",
            {.is_path = true});
    v.field(
        "format", format,
        "auto goes by the file's name and content. text: a file is one document, "
        "<|endoftext|> separates several; lines: a line is one; paragraphs: blank lines "
        "separate them; json: records, one a line or in an array; parquet: records, one a row; "
        "tokens: token files of `tessera tokenize`; megatron: .bin with .idx; synthetic: random "
        "tokens",
        {.choices = {"auto", "text", "lines", "paragraphs", "json", "parquet", "tokens", "megatron",
                     "synthetic"},
         .value_aliases = {{"jsonl", "json"}, {"txt", "text"}}});
    v.field("columns", columns,
            "Names of the record's fields where they differ from ours: {text: content}");
    v.field("weight", weight,
            "Share of the trained tokens; without it every record is seen once an epoch",
            {.above = 0});
    v.field("max_rows", max_rows, "Read only the first rows of the source",
            {.aliases = {"max_samples", "num_samples"}, .at_least = 1});
    v.field(
        "labels", labels,
        "Of pre-tokenised rows. aligned: labels[i] is input_ids[i] or -100, as in Hugging Face; "
        "shifted: labels[i] is the token after input_ids[i]; auto finds out from the whole source",
        {.choices = {"auto", "aligned", "shifted"}});
  }
};

struct DataOptions {
  std::vector<DataSource> train;
  std::vector<DataSource> eval;
  double eval_fraction = 0;
  bool packing = true;
  std::string overlong = "auto";
  std::string bad_rows = "stop";
  std::vector<std::string> skip_steps;
  std::string skip_records;
  std::string tokenizer;
  std::vector<std::string> add_tokens;
  std::string cache_dir;

  void visit(FieldVisitor& v) {
    v.list("train", train, "Sources that are trained on", {.shorthand = "path"});
    v.list("eval", eval, "Sources that are evaluated on",
           {.free_on_resume = true, .shorthand = "path"});
    v.field(
        "eval_fraction", eval_fraction,
        "Part of `train` held out for evaluation when `eval` is empty: whole records, or the end "
        "of each text where there are few",
        {.aliases = {"val_set_size", "val_size", "split_dataset_ratio"},
         .at_least = 0,
         .below = 1});
    v.field("packing", packing,
            "Put several records into one row of sequence_length tokens; they never see each other",
            {.aliases = {"sample_packing", "packed"}});
    v.field(
        "overlong", overlong,
        "Records longer than sequence_length. split: into rows that together train every token; "
        "cut: the end is lost; drop: the record is lost; auto: split, and cut where records "
        "carry labels",
        {.choices = {"auto", "split", "cut", "drop"}, .value_aliases = {{"truncate", "cut"}}});
    v.field("bad_rows", bad_rows,
            "Records that cannot be read. stop: an error with file and line; "
            "skip: counted and left out",
            {.choices = {"stop", "skip"}});
    v.field("skip_steps", skip_steps,
            "Steps whose data is passed over, such as 1200 or 1200-1250; the data behind moves up",
            {.free_on_resume = true});
    v.field("skip_records", skip_records,
            "File that lists records to leave out, one a line as in the provenance of a step: FILE "
            "record NUMBER",
            {.is_path = true});
    v.field("tokenizer", tokenizer,
            "Folder or tokenizer.json, or `bytes`; the model's own when empty", {.is_path = true});
    v.field("add_tokens", add_tokens,
            "New special tokens, behind the vocabulary; their embeddings start as the mean of the "
            "others");
    v.field(
        "cache_dir", cache_dir,
        "Where prepared data is kept; empty: ~/.cache/tessera. Shared storage prepares once for "
        "all nodes",
        {.aliases = {"dataset_prepared_path"}, .free_on_resume = true, .is_path = true});
  }
};

}  // namespace tessera
