#include "data/readers/parquet_reader.h"

#include "engine/core/error.h"

#if TESSERA_WITH_PARQUET
#include <fmt/format.h>
#include <parquet/column_reader.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/schema.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#endif

namespace tessera {

#if TESSERA_WITH_PARQUET

namespace {

// Rows that a column hands out at a time.
constexpr std::int64_t kBatch = 1024;

// Runs `action` with the library's exceptions told as ours.
template <typename Action>
auto reading(const std::filesystem::path& path, Action&& action) {
  try {
    return action();
  } catch (const ::parquet::ParquetStatusException& error) {
    if (error.status().IsIOError()) {
      TESSERA_FAIL(ErrorKind::kTransient, "[data] {} cannot be read: {}", path.string(),
                   error.what());
    }
    TESSERA_FAIL(ErrorKind::kUser, "[data] {} is not a Parquet file that can be read: {}",
                 path.string(), error.what());
  } catch (const ::parquet::ParquetException& error) {
    TESSERA_FAIL(ErrorKind::kUser, "[data] {} is not a Parquet file that can be read: {}",
                 path.string(), error.what());
  }
}

std::unique_ptr<::parquet::ParquetFileReader> open_file(const std::filesystem::path& path) {
  return reading(path, [&] {
    ::parquet::ReaderProperties properties = ::parquet::default_reader_properties();
    properties.enable_buffered_stream();  // else whole column chunks are held
    properties.set_buffer_size(std::int64_t{1} << 20);
    return ::parquet::ParquetFileReader::OpenFile(path.string(), false, properties);
  });
}

std::int64_t first_byte(const ::parquet::RowGroupMetaData& group) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < group.num_columns(); ++i) {
    const auto column = group.ColumnChunk(i);
    first = std::min(first, column->data_page_offset());
    if (column->has_dictionary_page()) first = std::min(first, column->dictionary_page_offset());
  }
  return first;
}

void append_json_string(std::string_view text, std::string& out) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

// A column of one row group, row by row: a scalar or the elements of a list.
class Column {
 public:
  virtual ~Column() = default;
  virtual void append_row(std::string& json) = 0;
};

void append_value(const ::parquet::ByteArray& value, std::string& json) {
  append_json_string({reinterpret_cast<const char*>(value.ptr), value.len}, json);
}
void append_value(bool value, std::string& json) { json += value ? '1' : '0'; }
template <typename T>
void append_value(T value, std::string& json) {
  fmt::format_to(std::back_inserter(json), "{}", value);
}

template <typename ParquetType>
class TypedColumn : public Column {
 public:
  // An element is there from definition level `max` on; a list has entries from `entry_level` on
  // and is there, if empty, from entry_level - 1 on.
  TypedColumn(std::shared_ptr<::parquet::ColumnReader> reader, std::int16_t entry_level)
      : reader_(std::move(reader)),
        typed_(static_cast<::parquet::TypedColumnReader<ParquetType>*>(reader_.get())),
        max_(reader_->descr()->max_definition_level()),
        is_list_(reader_->descr()->max_repetition_level() > 0),
        entry_level_(entry_level) {}

  void append_row(std::string& json) override {
    if (!fill()) throw ::parquet::ParquetException("a column ends before the others");
    if (!is_list_) return append_element(json);
    const std::int16_t level = definitions_[next_];
    if (level < entry_level_) {
      ++next_;
      json += level + 1 < entry_level_ ? "null" : "[]";
      return;
    }
    json += '[';
    append_element(json);
    while (fill() && repetitions_[next_] > 0) {
      json += ',';
      append_element(json);
    }
    json += ']';
  }

 private:
  using Value = typename ParquetType::c_type;

  void append_element(std::string& json) {
    if (max_ > 0 && definitions_[next_] < max_) {
      json += "null";
    } else {
      append_value(values_[next_value_++], json);
    }
    ++next_;
  }

  // Whether there is another entry. Values are valid until the next call that reads more.
  bool fill() {
    if (next_ < count_) return true;
    if (!reader_->HasNext()) return false;
    std::int64_t num_values = 0;
    count_ = typed_->ReadBatch(kBatch, definitions_, repetitions_, values_, &num_values);
    next_ = next_value_ = 0;
    return count_ > 0;
  }

  std::shared_ptr<::parquet::ColumnReader> reader_;
  ::parquet::TypedColumnReader<ParquetType>* typed_;
  std::int16_t max_;
  bool is_list_;
  std::int16_t entry_level_;
  std::int16_t definitions_[kBatch];
  std::int16_t repetitions_[kBatch];
  Value values_[kBatch];
  std::int64_t count_ = 0;
  std::int64_t next_ = 0;
  std::int64_t next_value_ = 0;
};

// The definition level from which on the repeated field of a list has an entry.
std::int16_t level_of_entries(const ::parquet::ColumnDescriptor& column) {
  std::vector<const ::parquet::schema::Node*> nodes;
  for (const auto* node = column.schema_node().get(); node != nullptr; node = node->parent()) {
    nodes.push_back(node);
  }
  std::int16_t level = 0;
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    if ((*node)->parent() == nullptr) continue;  // the root
    if (!(*node)->is_required()) ++level;
    if ((*node)->is_repeated()) return level;
  }
  return level;
}

class ParquetRecords : public RecordReader {
 public:
  ParquetRecords(const FileRange& range, const ColumnNames& columns)
      : range_(range), file_(open_file(range.file.path)), metadata_(file_->metadata()) {
    for (int i = 0; i < metadata_->num_row_groups(); ++i) {
      const std::int64_t begin = first_byte(*metadata_->RowGroup(i));
      if (begin >= range.begin && begin < range.end) groups_.push_back(i);
    }
    choose_columns(columns);
  }

  bool next(RawRecord& record) override {
    return reading(range_.file.path, [&] {
      while (row_ == rows_) {
        if (next_group_ == groups_.size()) {
          is_done_ = true;
          return false;
        }
        open_group(groups_[next_group_++]);
      }
      record.starts_document = record.ends_document = true;
      record.line = ++rows_read_;
      record.bytes = '{';
      for (std::size_t i = 0; i < wanted_.size(); ++i) {
        if (i > 0) record.bytes += ',';
        append_json_string(wanted_[i].name, record.bytes);
        record.bytes += ':';
        columns_[i]->append_row(record.bytes);
      }
      record.bytes += others_;
      record.bytes += '}';
      ++row_;
      return true;
    });
  }

  std::int64_t position() const override {
    if (is_done_) return range_.end - range_.begin;
    if (rows_ == 0) return 0;
    return std::max<std::int64_t>(0, group_begin_ - range_.begin) + group_bytes_ * row_ / rows_;
  }

 private:
  struct Wanted {
    std::string name;
    int column = 0;
    std::int16_t entry_level = 0;
  };

  // Of the columns whose names a record can have, those of a type that fits. The names of the
  // others go along as nulls where nothing fits, for the message that lists them.
  void choose_columns(const ColumnNames& columns) {
    const ::parquet::SchemaDescriptor& schema = *metadata_->schema();
    std::string other_names;
    for (int i = 0; i < schema.num_columns(); ++i) {
      const ::parquet::ColumnDescriptor& column = *schema.Column(i);
      const std::string name = schema.GetColumnRoot(i)->name();
      if (!is_record_field(columns, name)) {
        other_names += ',';
        append_json_string(name, other_names);
        other_names += ":null";
        continue;
      }
      const bool is_integer = column.physical_type() == ::parquet::Type::INT32 ||
                              column.physical_type() == ::parquet::Type::INT64 ||
                              column.physical_type() == ::parquet::Type::BOOLEAN;
      const bool is_text = column.physical_type() == ::parquet::Type::BYTE_ARRAY;
      const int lists = column.max_repetition_level();
      const bool fits = (is_text && lists == 0) || (is_integer && lists == 1);
      CHECK_USER(fits, "[data] {}: column {} is {}, expected text or a list of integers",
                 range_.file.path.string(), name,
                 (lists > 0 ? "a list of " : "") + ::parquet::TypeToString(column.physical_type()));
      wanted_.push_back({name, i, level_of_entries(column)});
    }
    if (wanted_.empty() && !other_names.empty()) others_ = other_names.substr(1);
  }

  void open_group(int index) {
    const auto group = metadata_->RowGroup(index);
    group_ = file_->RowGroup(index);
    group_begin_ = first_byte(*group);
    group_bytes_ = group->total_compressed_size();
    rows_ = group->num_rows();
    row_ = 0;
    columns_.clear();
    for (const Wanted& wanted : wanted_) columns_.push_back(open_column(wanted));
  }

  std::unique_ptr<Column> open_column(const Wanted& wanted) {
    std::shared_ptr<::parquet::ColumnReader> reader = group_->Column(wanted.column);
    switch (reader->type()) {
      case ::parquet::Type::BOOLEAN:
        return std::make_unique<TypedColumn<::parquet::BooleanType>>(reader, wanted.entry_level);
      case ::parquet::Type::INT32:
        return std::make_unique<TypedColumn<::parquet::Int32Type>>(reader, wanted.entry_level);
      case ::parquet::Type::INT64:
        return std::make_unique<TypedColumn<::parquet::Int64Type>>(reader, wanted.entry_level);
      case ::parquet::Type::BYTE_ARRAY:
        return std::make_unique<TypedColumn<::parquet::ByteArrayType>>(reader, wanted.entry_level);
      default:
        TESSERA_FAIL(ErrorKind::kInternal, "[data] a column of an unexpected type");
    }
  }

  FileRange range_;
  std::unique_ptr<::parquet::ParquetFileReader> file_;
  std::shared_ptr<::parquet::FileMetaData> metadata_;
  std::vector<int> groups_;
  std::vector<Wanted> wanted_;
  std::string others_;

  std::size_t next_group_ = 0;
  std::shared_ptr<::parquet::RowGroupReader> group_;
  std::vector<std::unique_ptr<Column>> columns_;
  std::int64_t group_begin_ = 0;
  std::int64_t group_bytes_ = 0;
  std::int64_t rows_ = 0;  // of the group
  std::int64_t row_ = 0;   // handed out of it
  std::int64_t rows_read_ = 0;
  bool is_done_ = false;
};

}  // namespace

bool has_parquet() { return true; }

std::unique_ptr<RecordReader> open_parquet(const FileRange& range, const ColumnNames& columns) {
  return reading(range.file.path, [&] { return std::make_unique<ParquetRecords>(range, columns); });
}

std::int64_t parquet_rows_before(const FileRange& range) {
  return reading(range.file.path, [&] {
    const auto metadata = open_file(range.file.path)->metadata();
    std::int64_t rows = 0;
    for (int i = 0; i < metadata->num_row_groups(); ++i) {
      const auto group = metadata->RowGroup(i);
      if (first_byte(*group) < range.begin) rows += group->num_rows();
    }
    return rows;
  });
}

void require_parquet(const std::filesystem::path&) {}

#else

bool has_parquet() { return false; }

void require_parquet(const std::filesystem::path& path) {
  TESSERA_FAIL(
      ErrorKind::kUser,
      "[data] {} is a Parquet file, which this build cannot read; install the Arrow and "
      "Parquet C++ libraries (libarrow-dev and libparquet-dev of apache.org's packages, or "
      "PyPI's pyarrow with -DARROW_ROOT=.../site-packages/pyarrow) and build again, or "
      "convert the file to JSON lines",
      path.string());
}

std::unique_ptr<RecordReader> open_parquet(const FileRange& range, const ColumnNames&) {
  require_parquet(range.file.path);
  return nullptr;
}

std::int64_t parquet_rows_before(const FileRange& range) {
  require_parquet(range.file.path);
  return 0;
}

#endif

}  // namespace tessera
