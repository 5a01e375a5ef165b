#include "data/tokenizer/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>

#include "data/tokenizer/bpe.h"
#include "data/tokenizer/decoder.h"
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/post_processor.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "data/tokenizer/tokenizer_files.h"
#include "data/tokenizer/tokenizer_json.h"
#include "data/tokenizer/utf8.h"
#include "engine/core/error.h"
#include "engine/core/log.h"

namespace tessera {
namespace {

// Texts a thread of encode_batch takes at a time.
constexpr std::size_t kBatchStep = 16;

// What one call of encode works in: the caches and buffers are kept from call to call.
struct Workspace {
  BpeModel::Scratch model;
  Normalizer::Scratch normalizer;
  PreTokenizer::Scratch pre_tokenizer;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> word_spans;
};

AddedToken parse_added_token(const nlohmann::json& entry, std::string_view file) {
  CHECK_USER(entry.is_object() && entry.contains("content") && entry["content"].is_string() &&
                 entry.contains("id") && entry["id"].is_number_unsigned() &&
                 entry["id"].get<std::uint64_t>() < std::numeric_limits<std::int32_t>::max(),
             "[tokenizer] {}: an added token without \"id\" and \"content\": {}", file,
             entry.dump());
  const auto flag = [&](const char* key, bool fallback) {
    const auto found = entry.find(key);
    return found != entry.end() && found->is_boolean() ? found->get<bool>() : fallback;
  };
  AddedToken token;
  token.content = entry["content"].get<std::string>();
  token.single_word = flag("single_word", false);
  token.lstrip = flag("lstrip", false);
  token.rstrip = flag("rstrip", false);
  token.special = flag("special", false);
  token.normalized = flag("normalized", !token.special);
  return token;
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerFiles tokenizer_files);

  void add_from_file(std::int32_t file_id, AddedToken token);
  void set_added(std::int32_t id, AddedToken token);
  void finish_added();
  std::int32_t id_of(std::string_view token) const;
  void name_special_ids(const TokenizerConfig& config);
  void apply_bos_eos(const TokenizerConfig& config);

  std::unique_ptr<Workspace> take_workspace() const;
  void return_workspace(std::unique_ptr<Workspace> workspace) const;

  template <typename Word, typename Token>
  void cut(std::string_view text, const EncodeOptions& options, bool keep_origin,
           Workspace& workspace, Word&& word, Token&& token) const;
  void encode(std::string_view text, const EncodeOptions& options, Workspace& workspace,
              std::vector<std::int32_t>& ids) const;

  TokenizerFiles files;
  std::unique_ptr<BpeModel> model;
  AddedTokens added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  PostProcessor post_processor;
  Decoder decoder;
  SpecialIds special_ids;
  std::vector<std::int32_t> changed;  // added or altered since the files were read
  bool needs_origin = false;
  bool needs_utf8 = true;

  mutable std::mutex workspace_mutex;
  mutable std::vector<std::unique_ptr<Workspace>> workspaces;
};

Tokenizer::Impl::Impl(TokenizerFiles tokenizer_files) : files(std::move(tokenizer_files)) {
  const std::string& file = files.name;
  TokenizerJson json = parse_tokenizer_json(files.content.at("tokenizer.json"), file);
  model = std::make_unique<BpeModel>(std::move(json.model), file);
  normalizer = Normalizer(json.part("normalizer"), file);
  pre_tokenizer = PreTokenizer(json.part("pre_tokenizer"), file);
  post_processor = parse_post_processor(json.part("post_processor"), file);
  decoder = Decoder(json.part("decoder"), file);
  needs_origin = pre_tokenizer.needs_origin(!normalizer.is_identity());
  bool takes_bytes = false;
  if (pre_tokenizer.ends_in_byte_level() && model->can_encode_bytes()) {
    model->encode_bytes();
    pre_tokenizer.keep_bytes();
    takes_bytes = true;
  }
  needs_utf8 = !takes_bytes || !normalizer.is_identity() || pre_tokenizer.needs_utf8();

  const nlohmann::json& list = json.part("added_tokens");
  CHECK_USER(list.is_null() || list.is_array(), "[tokenizer] {}: added_tokens is not a list", file);
  for (const nlohmann::json& entry : list) {
    AddedToken token = parse_added_token(entry, file);
    add_from_file(entry["id"].get<std::int32_t>(), std::move(token));
  }
  const TokenizerConfig config = parse_tokenizer_config(files);
  for (const auto& [id, token] : config.added_tokens) {
    // tokenizer.json decides about the tokens that it has.
    if (added.id_of(token.content) >= 0) continue;
    add_from_file(id, token);
    changed.push_back(added.id_of(token.content));
  }
  finish_added();
  name_special_ids(config);
  apply_bos_eos(config);
}

// Takes the token under the id of the file. A token that the vocabulary holds keeps the id it has
// there, as in the reference library.
void Tokenizer::Impl::add_from_file(std::int32_t file_id, AddedToken token) {
  if (token.content.empty()) return;
  std::int32_t id = id_of(token.content);
  if (id < 0) {
    id = file_id;
    const auto other = model->vocabulary().text_of(id);
    const AddedToken* other_added = added.find(id);
    CHECK_USER(
        !other && other_added == nullptr,
        "[tokenizer] {}: added token \"{}\" has the id {}, which \"{}\" has already; give it a "
        "free id",
        files.name, token.content, id, other ? std::string(*other) : other_added->content);
  } else if (id != file_id) {
    log::warning(
        "[tokenizer] {}: added token \"{}\" is listed with the id {} but the vocabulary has "
        "it as {}; {} is used",
        files.name, token.content, file_id, id, id);
  }
  set_added(id, std::move(token));
}

void Tokenizer::Impl::set_added(std::int32_t id, AddedToken token) {
  std::string normal_form = token.content;
  if (token.normalized && !normalizer.is_identity()) {
    Normalizer::Scratch scratch;
    normal_form = normalizer.apply({token.content}, false, scratch).text;
  }
  added.set(id, std::move(token), std::move(normal_form));
}

void Tokenizer::Impl::finish_added() {
  added.rebuild();
  for (const std::int32_t id : added.ids()) {
    const AddedToken& token = *added.find(id);
    if (token.single_word || token.lstrip || token.rstrip) needs_utf8 = true;
  }
}

std::int32_t Tokenizer::Impl::id_of(std::string_view token) const {
  const std::int32_t id = added.id_of(token);
  return id >= 0 ? id : model->vocabulary().id_of(token);
}

void Tokenizer::Impl::name_special_ids(const TokenizerConfig& config) {
  const auto find = [&](const char* name, const std::optional<std::string>& token) {
    if (!token || token->empty()) return -1;
    const std::int32_t id = id_of(*token);
    if (id < 0) {
      log::warning("[tokenizer] {}: {} is \"{}\", which is not in the vocabulary; it is left unset",
                   files.name, name, *token);
    }
    return id;
  };
  special_ids.bos = find("bos_token", config.bos);
  special_ids.eos = find("eos_token", config.eos);
  special_ids.pad = find("pad_token", config.pad);
  special_ids.unk = find("unk_token", config.unk);
}

// The post-processor decides what surrounds a text. Files without one leave it to the switches of
// tokenizer_config.json.
void Tokenizer::Impl::apply_bos_eos(const TokenizerConfig& config) {
  if (!post_processor.prefix.empty() || !post_processor.suffix.empty()) {
    const bool adds_bos = std::find(post_processor.prefix.begin(), post_processor.prefix.end(),
                                    special_ids.bos) != post_processor.prefix.end();
    if (config.add_bos && special_ids.bos >= 0 && *config.add_bos != adds_bos) {
      log::warning(
          "[tokenizer] {}: add_bos_token is {} in tokenizer_config.json but the "
          "post_processor of tokenizer.json {} it; the post_processor is followed",
          files.name, *config.add_bos, adds_bos ? "adds" : "does not add");
    }
    return;
  }
  if (config.add_bos.value_or(false) && special_ids.bos >= 0) {
    post_processor.prefix.push_back(special_ids.bos);
  }
  if (config.add_eos.value_or(false) && special_ids.eos >= 0) {
    post_processor.suffix.push_back(special_ids.eos);
  }
}

std::unique_ptr<Workspace> Tokenizer::Impl::take_workspace() const {
  {
    const std::lock_guard lock(workspace_mutex);
    if (!workspaces.empty()) {
      std::unique_ptr<Workspace> workspace = std::move(workspaces.back());
      workspaces.pop_back();
      return workspace;
    }
  }
  return std::make_unique<Workspace>();
}

void Tokenizer::Impl::return_workspace(std::unique_ptr<Workspace> workspace) const {
  const std::lock_guard lock(workspace_mutex);
  workspaces.push_back(std::move(workspace));
}

// Calls word(TextView) for each word of the text and token(id, TextView) for each added token.
template <typename Word, typename Token>
void Tokenizer::Impl::cut(std::string_view text, const EncodeOptions& options, bool keep_origin,
                          Workspace& workspace, Word&& word, Token&& token) const {
  CHECK_USER(text.size() < std::numeric_limits<std::uint32_t>::max(),
             "[tokenizer] one text of {} bytes; texts must be below 4 GiB, split it", text.size());
  if (needs_utf8) {
    const std::size_t bad = utf8::find_invalid(text);
    CHECK_USER(bad == std::string_view::npos,
               "[tokenizer] the text is not valid UTF-8: byte {} is 0x{:02x}; convert the file to "
               "UTF-8",
               bad, static_cast<unsigned char>(text[bad]));
  }
  const bool keeps = keep_origin || needs_origin;
  const auto words_of = [&](const TextView& piece) {
    pre_tokenizer.for_each_word(piece, keeps, workspace.pre_tokenizer, word);
  };
  const auto normalize = [&](const TextView& piece) {
    const TextView normal = normalizer.apply(piece, keeps, workspace.normalizer);
    added.cut(normal, true, options.split_special_tokens, words_of, token);
  };
  added.cut(TextView{text}, false, options.split_special_tokens, normalize, token);
}

void Tokenizer::Impl::encode(std::string_view text, const EncodeOptions& options,
                             Workspace& workspace, std::vector<std::int32_t>& ids) const {
  if (options.add_special_tokens) {
    ids.insert(ids.end(), post_processor.prefix.begin(), post_processor.prefix.end());
  }
  cut(
      text, options, false, workspace,
      [&](const TextView& word) { model->encode(word.text, workspace.model, ids); },
      [&](std::int32_t id, const TextView&) { ids.push_back(id); });
  if (options.add_special_tokens) {
    ids.insert(ids.end(), post_processor.suffix.begin(), post_processor.suffix.end());
  }
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  return Tokenizer(std::make_unique<Impl>(read_tokenizer_files(path)));
}

Tokenizer Tokenizer::bytes() { return Tokenizer(std::make_unique<Impl>(byte_tokenizer_files())); }

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::vector<std::int32_t> ids;
  encode_append(text, {.add_special_tokens = add_special_tokens}, ids);
  return ids;
}

void Tokenizer::encode_append(std::string_view text, const EncodeOptions& options,
                              std::vector<std::int32_t>& ids) const {
  std::unique_ptr<Workspace> workspace = impl_->take_workspace();
  impl_->encode(text, options, *workspace, ids);
  impl_->return_workspace(std::move(workspace));
}

Encoding Tokenizer::encode_with_spans(std::string_view text, const EncodeOptions& options) const {
  Encoding encoding;
  std::unique_ptr<Workspace> workspace = impl_->take_workspace();
  const auto end = static_cast<std::uint32_t>(text.size());
  const auto add_special = [&](std::span<const std::int32_t> ids, std::uint32_t at) {
    for (const std::int32_t id : ids) {
      encoding.ids.push_back(id);
      encoding.spans.push_back({at, at});
    }
  };
  // Out to the borders of the characters that the span touches.
  const auto add_span = [&](TextSpan span) {
    while (span.begin > 0 && span.begin < end && utf8::is_continuation(text[span.begin]))
      --span.begin;
    while (span.end < end && utf8::is_continuation(text[span.end])) ++span.end;
    encoding.spans.push_back(span);
  };
  if (options.add_special_tokens) add_special(impl_->post_processor.prefix, 0);
  impl_->cut(
      text, options, true, *workspace,
      [&](const TextView& word) {
        workspace->word_spans.clear();
        impl_->model->encode(word.text, workspace->model, encoding.ids, workspace->word_spans);
        for (const auto& [from, to] : workspace->word_spans) add_span(word.origin_of(from, to));
      },
      [&](std::int32_t id, const TextView& piece) {
        encoding.ids.push_back(id);
        add_span(piece.text.empty() ? TextSpan{} : piece.origin_of(0, piece.text.size()));
      });
  if (options.add_special_tokens) add_special(impl_->post_processor.suffix, end);
  impl_->return_workspace(std::move(workspace));
  return encoding;
}

std::vector<std::vector<std::int32_t>> Tokenizer::encode_batch(
    std::span<const std::string_view> texts, const EncodeOptions& options, int num_threads) const {
  std::vector<std::vector<std::int32_t>> results(texts.size());
  const std::size_t steps = (texts.size() + kBatchStep - 1) / kBatchStep;
  std::size_t threads = num_threads > 0 ? static_cast<std::size_t>(num_threads)
                                        : std::max(1u, std::thread::hardware_concurrency());
  threads = std::max<std::size_t>(1, std::min(threads, steps));
  std::atomic<std::size_t> next{0};
  std::vector<std::exception_ptr> errors(threads);
  const auto work = [&](std::size_t thread) {
    try {
      std::unique_ptr<Workspace> workspace = impl_->take_workspace();
      for (std::size_t step = next++; step < steps; step = next++) {
        const std::size_t end = std::min(texts.size(), (step + 1) * kBatchStep);
        for (std::size_t i = step * kBatchStep; i < end; ++i) {
          impl_->encode(texts[i], options, *workspace, results[i]);
        }
      }
      impl_->return_workspace(std::move(workspace));
    } catch (...) {
      errors[thread] = std::current_exception();
      next = steps;
    }
  };
  {
    std::vector<std::jthread> workers;
    for (std::size_t thread = 1; thread < threads; ++thread) workers.emplace_back(work, thread);
    work(0);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return results;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const std::int32_t id : ids) {
    if (const std::string* text = impl_->added.decoding_text(id)) {
      if (!skip_special_tokens || !impl_->added.is_special(id)) tokens.push_back(*text);
    } else if (const auto known = impl_->model->vocabulary().text_of(id)) {
      tokens.emplace_back(*known);
    }
  }
  if (tokens.empty()) return {};
  return impl_->decoder.decode(std::move(tokens));
}

std::int32_t Tokenizer::vocab_size() const {
  return std::max(impl_->model->vocabulary().largest_id(), impl_->added.largest_id()) + 1;
}

std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const std::int32_t id = impl_->id_of(token);
  if (id < 0) return std::nullopt;
  return id;
}

std::optional<std::string> Tokenizer::id_to_token(std::int32_t id) const {
  if (const AddedToken* token = impl_->added.find(id)) return token->content;
  if (const auto text = impl_->model->vocabulary().text_of(id)) return std::string(*text);
  return std::nullopt;
}

bool Tokenizer::is_special(std::int32_t id) const { return impl_->added.is_special(id); }

const Tokenizer::SpecialIds& Tokenizer::special_ids() const { return impl_->special_ids; }
void Tokenizer::set_special_ids(const SpecialIds& ids) { impl_->special_ids = ids; }

std::span<const std::int32_t> Tokenizer::prefix_ids() const { return impl_->post_processor.prefix; }
std::span<const std::int32_t> Tokenizer::suffix_ids() const { return impl_->post_processor.suffix; }

std::vector<std::int32_t> Tokenizer::add_tokens(std::span<const AddedToken> tokens) {
  std::vector<std::int32_t> ids;
  for (const AddedToken& token : tokens) {
    CHECK_USER(!token.content.empty(), "[tokenizer] an added token is empty; give it a text");
    CHECK_USER(utf8::find_invalid(token.content) == std::string_view::npos,
               "[tokenizer] an added token is not valid UTF-8");
    std::int32_t id = impl_->id_of(token.content);
    if (id < 0) id = vocab_size();
    impl_->set_added(id, token);
    if (std::find(impl_->changed.begin(), impl_->changed.end(), id) == impl_->changed.end()) {
      impl_->changed.push_back(id);
    }
    ids.push_back(id);
  }
  impl_->finish_added();
  return ids;
}

TokenizerFiles Tokenizer::files() const {
  std::vector<std::pair<std::int32_t, AddedToken>> tokens;
  for (const std::int32_t id : impl_->changed) tokens.emplace_back(id, *impl_->added.find(id));
  return with_added_tokens(impl_->files, tokens);
}

void Tokenizer::save(const std::filesystem::path& folder) const {
  write_tokenizer_files(files(), folder);
}

const std::string& Tokenizer::side_file(const std::string& name) const {
  static const std::string kNone;
  const auto found = impl_->files.content.find(name);
  return found == impl_->files.content.end() ? kNone : found->second;
}

}  // namespace tessera
