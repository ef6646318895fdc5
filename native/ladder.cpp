// The streams of one part of a block, written and read row by row.

#include "ladder.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace retain::ladder {
namespace {

using rans::Classes;
using rans::Decoder;
using rans::Encoder;
using rans::kLanes;
using rans::kSymbols;
using rans::kTotal;

constexpr std::size_t kStateBytes = 4 * kLanes;
constexpr std::int32_t kStepTable = kClasses, kEnergyTable = kClasses + 1, kClassTable = kClasses + 2;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Rows are read and written in whole steps of lanes.
std::size_t padded(std::size_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

Classes only(std::int32_t table, const std::vector<std::int32_t>& zeros) { return {table, table, table, zeros.data()}; }

Classes row_classes(const Tables& tables, std::size_t level, std::uint8_t own, const std::vector<std::int32_t>& shift) {
    return {own, tables.first(level), static_cast<std::int32_t>(kClasses) - 1, shift.data()};
}

std::vector<std::int32_t> shifts(const Part& part) {
    std::vector<std::int32_t> sum(padded(part.tokens), 0);
    for (std::size_t t = 0; t < part.tokens; ++t) {
        sum[t] = part.steps[t] + part.energy[t];
    }
    return sum;
}

// Collects what a coder spills, back to front.
class Writer {
  public:
    explicit Writer(std::size_t symbols) : room_(2 * symbols + 2 * kLanes) {
        std::fill_n(coder.state, kLanes, rans::kLow);
        coder.at = room_.data() + room_.size();
    }

    std::vector<std::uint8_t> finish() const {
        const auto escapes = static_cast<std::uint32_t>(coder.escapes.size());
        const std::size_t words = static_cast<std::size_t>(room_.data() + room_.size() - coder.at);
        std::vector<std::uint8_t> stream(4 + 2 * std::size_t{escapes} + kStateBytes + words);
        std::uint8_t* at = stream.data();
        at = put(at, escapes, 4);
        for (auto value = coder.escapes.rbegin(); value != coder.escapes.rend(); ++value) {
            at = put(at, static_cast<std::uint16_t>(*value), 2);
        }
        for (const std::uint32_t state : coder.state) {
            at = put(at, state, 4);
        }
        std::memcpy(at, coder.at, words);
        return stream;
    }

    Encoder coder;

  private:
    static std::uint8_t* put(std::uint8_t* at, std::uint32_t value, int bytes) {
        for (int i = 0; i < bytes; ++i) {
            *at++ = static_cast<std::uint8_t>(value >> 8 * i);
        }
        return at;
    }

    std::vector<std::uint8_t> room_;
};

std::uint32_t little(const std::uint8_t* at, int bytes) {
    std::uint32_t value = 0;
    for (int i = 0; i < bytes; ++i) {
        value |= static_cast<std::uint32_t>(at[i]) << 8 * i;
    }
    return value;
}

class Reader {
  public:
    explicit Reader(Bytes stream) {
        if (stream.size < 4 + kStateBytes) {
            refuse("a stream of " + std::to_string(stream.size) + " bytes is too short for the states of its coder");
        }
        const std::size_t escapes = little(stream.data, 4);
        if (escapes > (stream.size - 4 - kStateBytes) / 2) {
            refuse("a stream claims " + std::to_string(escapes) + " escapes, more than its bytes hold");
        }
        escapes_ = stream.data + 4;
        escapes_end_ = escapes_ + 2 * escapes;
        const std::uint8_t* at = escapes_end_;
        for (std::uint32_t& state : coder.state) {
            state = little(at, 4);
            if (state < rans::kLow) {
                refuse("a stream begins with an impossible state");
            }
            at += 4;
        }
        coder.at = at;
        coder.end = stream.data + stream.size;
    }

    bool any_escapes() const { return escapes_ != escapes_end_; }

    std::int16_t escape() {
        if (escapes_ == escapes_end_) {
            refuse("a stream holds fewer escapes than its symbols call for");
        }
        const auto value = static_cast<std::int16_t>(little(escapes_, 2));
        escapes_ += 2;
        if (value > kLargest || value < -kLargest) {
            refuse("a stream holds an escape of " + std::to_string(value) + ", beyond the largest number");
        }
        return value;
    }

    // An encoder starts at kLow and leaves nothing behind: a damaged stream hardly ever ends so.
    void finish() const {
        if (coder.at != coder.end || escapes_ != escapes_end_) {
            refuse("a stream is longer than its symbols");
        }
        if (std::any_of(std::begin(coder.state), std::end(coder.state), [](auto state) { return state != rans::kLow; })) {
            refuse("a stream does not end as its encoder began");
        }
    }

    Decoder coder;

  private:
    const std::uint8_t* escapes_;
    const std::uint8_t* escapes_end_;
};

constexpr char kShort[] = "a stream is shorter than its symbols";

std::vector<std::int16_t> side_row(Reader& from, const Tables& tables, std::int32_t table, std::size_t count) {
    const std::vector<std::int32_t> zeros(padded(count), 0);
    std::vector<std::int16_t> row(padded(count));
    if (!tables.kernels().decode(from.coder, tables.decode(), only(table, zeros), count, row.data())) {
        refuse(kShort);
    }
    row.resize(count);
    return row;
}

void decode_side(Reader& from, const Tables& tables, const Part& part) {
    const auto within = [](std::int32_t value, std::int32_t low, std::int32_t high) {
        if (value < low || value > high) {
            refuse("a stream holds a class outside its range");
        }
        return value;
    };
    const auto steps = side_row(from, tables, kStepTable, part.tokens);
    const auto energy = side_row(from, tables, kEnergyTable, part.tokens);
    const auto classes = side_row(from, tables, kClassTable, part.components);
    for (std::size_t t = 0; t < part.tokens; ++t) {
        part.steps[t] = static_cast<std::int8_t>(within(steps[t], kLeastStep, kMostStep));
        part.energy[t] = static_cast<std::int8_t>(within(energy[t], -kMostEnergy, kMostEnergy));
    }
    for (std::size_t c = 0; c < part.components; ++c) {
        part.classes[c] = static_cast<std::uint8_t>(within(part.expected[c] + classes[c], 0, kClasses - 1));
    }
}

void decode_base(const Tables& tables, const Part& part, Bytes stream) {
    Reader from(stream);
    decode_side(from, tables, part);
    const auto shift = shifts(part);
    for (std::size_t c = 0; c < part.components; ++c) {
        std::int16_t* row = part.numbers + c * part.tokens;
        if (part.classes[c] < tables.first(0)) {
            std::fill_n(row, part.tokens, std::int16_t{0});
            continue;
        }
        if (!tables.kernels().decode(from.coder, tables.decode(), row_classes(tables, 0, part.classes[c], shift),
                                     part.tokens, row)) {
            refuse(kShort);
        }
    }
    constexpr std::int16_t escaped = rans::kEscape - rans::kZero;
    if (from.any_escapes()) {
        std::int16_t* const end = part.numbers + part.components * part.tokens;
        for (std::int16_t* at = part.numbers; (at = std::find(at, end, escaped)) != end; ++at) {
            *at = from.escape();
        }
    }
    from.finish();
}

void decode_level(const Tables& tables, const Part& part, std::size_t level, Bytes stream) {
    Reader from(stream);
    const auto shift = shifts(part);
    for (std::size_t c = 0; c < part.components; ++c) {
        if (part.classes[c] >= tables.first(level) &&
            !tables.kernels().refine(from.coder, tables.splits(level), row_classes(tables, level, part.classes[c], shift),
                                     part.tokens, part.numbers + c * part.tokens)) {
            refuse(kShort);
        }
    }
    from.finish();
}

void must_be_zero(const Part& part, std::size_t c) {
    const std::int16_t* row = part.numbers + c * part.tokens;
    if (std::any_of(row, row + part.tokens, [](std::int16_t number) { return number != 0; })) {
        refuse("component " + std::to_string(c) + " has a class that stands for zeros, but holds other numbers");
    }
}

std::vector<std::uint8_t> encode_level(const Tables& tables, const Part& part, std::size_t level,
                                       const std::vector<std::int32_t>& shift) {
    Writer into(part.components * padded(part.tokens));
    for (std::size_t c = part.components; c-- > 0;) {
        if (part.classes[c] < tables.first(level)) {
            must_be_zero(part, c);
            continue;
        }
        tables.kernels().encode_refinement(into.coder, tables.splits(level),
                                           row_classes(tables, level, part.classes[c], shift), part.tokens,
                                           part.numbers + c * part.tokens);
    }
    return into.finish();
}

void write_side(Writer& into, const Tables& tables, std::int32_t table, const std::vector<std::int16_t>& row) {
    const std::vector<std::int32_t> zeros(padded(row.size()), 0);
    tables.kernels().encode(into.coder, tables.encode(), only(table, zeros), row.size(), row.data());
    if (!into.coder.escapes.empty()) {
        refuse("a class of " + std::to_string(into.coder.escapes.front()) + " has no symbol in its table");
    }
}

std::vector<std::uint8_t> encode_base(const Tables& tables, const Part& part, const std::vector<std::int32_t>& shift) {
    Writer into((part.components + 2) * padded(part.tokens) + padded(part.components));
    for (std::size_t c = part.components; c-- > 0;) {
        if (part.classes[c] < tables.first(0)) {
            must_be_zero(part, c);
            continue;
        }
        tables.kernels().encode(into.coder, tables.encode(), row_classes(tables, 0, part.classes[c], shift), part.tokens,
                                part.numbers + c * part.tokens);
    }
    std::vector<std::int16_t> escapes;
    escapes.swap(into.coder.escapes);
    std::vector<std::int16_t> row(part.components);
    std::transform(part.classes, part.classes + part.components, part.expected, row.begin(),
                   [](int own, int expected) { return static_cast<std::int16_t>(own - expected); });
    write_side(into, tables, kClassTable, row);
    write_side(into, tables, kEnergyTable, {part.energy, part.energy + part.tokens});
    write_side(into, tables, kStepTable, {part.steps, part.steps + part.tokens});
    into.coder.escapes.swap(escapes);
    return into.finish();
}

}  // namespace

Tables::Tables(const std::uint16_t* frequencies, const std::uint16_t* splits, const std::uint8_t* first,
               const rans::Kernels& kernels)
    : kernels_(&kernels),
      decode_((kClasses + kSideTables) * kTotal),
      encode_((kClasses + kSideTables) * kSymbols),
      splits_((kLevels - 1) * kClasses * rans::kContexts) {
    for (std::size_t level = 0; level < kLevels; ++level) {
        first_[level] = first[level];
        if (first[level] >= kClasses || (level > 0 && first[level] > first[level - 1])) {
            refuse("the first classes of the levels must fall and be below " + std::to_string(kClasses));
        }
    }
    for (std::size_t row = 0; row < kClasses + kSideTables; ++row) {
        std::uint32_t start = 0;
        for (std::uint32_t symbol = 0; symbol < kSymbols; ++symbol) {
            const std::uint32_t frequency = frequencies[row * kSymbols + symbol];
            if (frequency >= kTotal || start + frequency > kTotal) {
                refuse("table " + std::to_string(row) + " has a frequency of " + std::to_string(frequency) + " at " +
                       std::to_string(start) + " of " + std::to_string(kTotal));
            }
            if (frequency > 0) {
                encode_[row * kSymbols + symbol] = frequency | start << 16;
            }
            for (std::uint32_t place = 0; place < frequency; ++place) {
                decode_[row * kTotal + start + place] = frequency << 20 | place << 8 | symbol;
            }
            start += frequency;
        }
        if (start != kTotal) {
            refuse("the frequencies of table " + std::to_string(row) + " sum to " + std::to_string(start) + ", not " +
                   std::to_string(kTotal));
        }
        if ((frequencies[row * kSymbols + rans::kEscape] == 0) == (row < kClasses)) {
            refuse("table " + std::to_string(row) + (row < kClasses ? " lacks" : " must not have") + " an escape");
        }
    }
    for (std::size_t i = 0; i < splits_.size(); ++i) {
        const std::uint32_t middle = splits[2 * i], upper = splits[2 * i + 1];
        if (middle == 0 || middle >= upper || upper >= kTotal) {
            refuse("refinement table " + std::to_string(i) + " is split at " + std::to_string(middle) + " and " +
                   std::to_string(upper) + " of " + std::to_string(kTotal));
        }
        splits_[i] = middle | upper << 16;
    }
}

std::vector<std::vector<std::uint8_t>> encode(const Tables& tables, const Part& part, std::size_t level) {
    const std::size_t count = part.components * part.tokens;
    if (std::any_of(part.classes, part.classes + part.components, [](auto own) { return own >= kClasses; })) {
        refuse("classes must be below " + std::to_string(kClasses));
    }
    const auto shift = shifts(part);
    std::vector<std::vector<std::uint8_t>> streams(level + 1);
    for (std::size_t at = level; at > 0; --at) {
        streams[at] = encode_level(tables, part, at, shift);
        std::transform(part.numbers, part.numbers + count, part.numbers,
                       [](std::int16_t number) { return static_cast<std::int16_t>(rans::coarser(number)); });
    }
    if (std::any_of(part.numbers, part.numbers + count,
                    [](std::int16_t number) { return number > kLargest || number < -kLargest; })) {
        refuse("a number is beyond " + std::to_string(kLargest) + " base steps");
    }
    streams[0] = encode_base(tables, part, shift);
    return streams;
}

void decode(const Tables& tables, const Part& part, const std::vector<Bytes>& streams) {
    if (streams.empty() || streams.size() > kLevels) {
        refuse("a part has 1 to " + std::to_string(kLevels) + " streams, got " + std::to_string(streams.size()));
    }
    decode_base(tables, part, streams[0]);
    for (std::size_t level = 1; level < streams.size(); ++level) {
        decode_level(tables, part, level, streams[level]);
    }
}

}  // namespace retain::ladder
