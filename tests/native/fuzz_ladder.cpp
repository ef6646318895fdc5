// Feeds damaged streams and tables to the ladder's decoder, built with AddressSanitizer: `make fuzz`.
//
// Streams that an encoder wrote are cut, flipped, spliced and rewritten; every buffer has exactly its size, and every path
// of the coder must accept and refuse the same streams and read the same numbers from them.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>

#include "ladder.hpp"

namespace {

using namespace retain;
using Stream = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

struct Source {
    std::vector<std::uint16_t> frequencies, splits;
    std::vector<std::uint8_t> first{16, 13, 10, 7};
};

// Frequencies that sum to 4096, most of them around the number 0.
Source tables_from(Random& random) {
    Source made;
    made.frequencies.assign((ladder::kClasses + ladder::kSideTables) * rans::kSymbols, 0);
    for (std::size_t row = 0; row < ladder::kClasses + ladder::kSideTables; ++row) {
        std::uint16_t* table = made.frequencies.data() + row * rans::kSymbols;
        const std::size_t reach = row < ladder::kClasses ? 1 + below(random, 62) : 45;
        std::size_t left = rans::kTotal;
        for (std::size_t symbol = 63 - reach; symbol <= 63 + reach; ++symbol) {
            table[symbol] = static_cast<std::uint16_t>(1 + below(random, left / (4 * reach + 4)));
            left -= table[symbol];
        }
        if (row < ladder::kClasses) {
            table[rans::kEscape] = 1;
            --left;
        }
        table[62] = static_cast<std::uint16_t>(table[62] + left / 2);
        table[63] = static_cast<std::uint16_t>(table[63] + left - left / 2);
    }
    for (std::size_t i = 0; i < (ladder::kLevels - 1) * ladder::kClasses * rans::kContexts; ++i) {
        const std::size_t low = 1 + below(random, 4000);
        made.splits.push_back(static_cast<std::uint16_t>(low));
        made.splits.push_back(static_cast<std::uint16_t>(low + 1 + below(random, 4095 - low)));
    }
    return made;
}

struct Arrays {
    std::vector<std::int16_t> numbers;
    std::vector<std::uint8_t> classes;
    std::vector<std::int8_t> steps, energy;

    Arrays(std::size_t components, std::size_t tokens)
        : numbers(components * tokens), classes(components), steps(tokens), energy(tokens) {}
    ladder::Part part(const std::vector<std::uint8_t>& expected) {
        return {classes.size(), steps.size(), numbers.data(), classes.data(), expected.data(), steps.data(), energy.data()};
    }
    bool operator==(const Arrays& other) const {
        return numbers == other.numbers && classes == other.classes && steps == other.steps && energy == other.energy;
    }
    bool operator!=(const Arrays& other) const { return !(*this == other); }
};

Arrays arrays_from(Random& random, std::size_t components, std::size_t tokens) {
    Arrays made(components, tokens);
    for (std::size_t c = 0; c < components; ++c) {
        made.classes[c] = static_cast<std::uint8_t>(16 + below(random, 24));
        const bool loud = below(random, 8) == 0;
        for (std::size_t t = 0; t < tokens; ++t) {
            made.numbers[c * tokens + t] = static_cast<std::int16_t>(static_cast<int>(below(random, loud ? 60000 : 200)) -
                                                                     (loud ? 30000 : 100));
        }
    }
    for (std::size_t t = 0; t < tokens; ++t) {
        made.steps[t] = static_cast<std::int8_t>(static_cast<int>(below(random, 16)) - 6);
        made.energy[t] = static_cast<std::int8_t>(static_cast<int>(below(random, 9)) - 4);
    }
    return made;
}

void damage(Random& random, std::vector<Stream>& streams) {
    Stream& stream = streams[below(random, streams.size())];
    for (std::size_t times = 1 + below(random, 4); times-- > 0;) {
        switch (below(random, 7)) {
            case 0: stream.resize(below(random, stream.size() + 1)); break;
            case 1: if (!stream.empty()) stream[below(random, stream.size())] ^= static_cast<std::uint8_t>(1 << below(random, 8)); break;
            case 2: stream.resize(stream.size() + 1 + below(random, 80), static_cast<std::uint8_t>(random())); break;
            case 3: if (stream.size() >= 4) { const auto claim = static_cast<std::uint32_t>(random()); std::memcpy(stream.data(), &claim, 4); } break;
            case 4: if (stream.size() >= 4) { const auto claim = static_cast<std::uint32_t>(below(random, 2000)); std::memcpy(stream.data(), &claim, 4); } break;
            case 5: {
                const std::size_t at = below(random, stream.size() + 1), count = std::min(stream.size() - at, below(random, 300));
                for (std::size_t i = 0; i < count; ++i) stream[at + i] = static_cast<std::uint8_t>(random());
                break;
            }
            default: stream = streams[below(random, streams.size())]; break;
        }
    }
}

std::optional<Arrays> decoded(const ladder::Tables& tables, const std::vector<Stream>& streams, std::size_t components,
                              std::size_t tokens, const std::vector<std::uint8_t>& expected) {
    Arrays out(components, tokens);
    std::vector<std::unique_ptr<std::uint8_t[]>> exact;  // of their very size, so that one byte too far is noticed
    std::vector<ladder::Bytes> rows;
    for (const Stream& stream : streams) {
        exact.push_back(std::make_unique<std::uint8_t[]>(stream.size()));
        std::copy(stream.begin(), stream.end(), exact.back().get());
        rows.push_back({exact.back().get(), stream.size()});
    }
    try {
        ladder::decode(tables, out.part(expected), rows);
    } catch (const std::invalid_argument&) {
        return std::nullopt;
    }
    return out;
}

[[noreturn]] void fail(const char* what, std::uint64_t seed) {
    std::printf("%s; seed %llu\n", what, static_cast<unsigned long long>(seed));
    std::abort();
}

bool run_once(std::uint64_t seed) {
    Random random(seed);
    Source source = tables_from(random);
    std::vector<ladder::Tables> paths;
    for (const auto* kernels : rans::kernels()) {
        paths.emplace_back(source.frequencies.data(), source.splits.data(), source.first.data(), *kernels);
    }
    const std::size_t components = 1 + below(random, 24), tokens = 1 + below(random, 100), level = below(random, 4);
    std::vector<std::uint8_t> expected(components);
    for (auto& each : expected) each = static_cast<std::uint8_t>(below(random, ladder::kClasses));
    const Arrays given = arrays_from(random, components, tokens);
    Arrays work = given;
    for (auto& number : work.numbers) {
        for (std::size_t i = level; i < 3; ++i) number = static_cast<std::int16_t>(rans::coarser(number));
    }
    Arrays wanted = work;
    std::vector<Stream> streams;
    for (const auto& tables : paths) {
        Arrays copy = wanted;
        auto written = ladder::encode(tables, copy.part(expected), level);
        if (!streams.empty() && written != streams) fail("two paths write different streams", seed);
        streams = std::move(written);
    }
    for (const auto& tables : paths) {
        if (decoded(tables, streams, components, tokens, expected) != wanted) fail("a stream does not come back", seed);
    }
    bool refused = false;
    for (int times = 0; times < 40; ++times) {
        std::vector<Stream> bad = streams;
        damage(random, bad);
        std::optional<std::optional<Arrays>> before;
        for (const auto& tables : paths) {
            auto found = decoded(tables, bad, components, tokens, expected);
            refused |= !found;
            if (before && found != *before) fail("two paths read a damaged stream differently", seed);
            before = std::move(found);
        }
    }
    auto hostile = source.frequencies;  // any table is refused or codes
    hostile[below(random, hostile.size())] = static_cast<std::uint16_t>(random());
    try {
        const ladder::Tables tables(hostile.data(), source.splits.data(), source.first.data(), *rans::kernels().front());
        (void)decoded(tables, streams, components, tokens, expected);
    } catch (const std::invalid_argument&) {
    }
    return refused;
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count > 1 ? std::atof(arguments[1]) : 600;
    std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device{}();
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
    std::uint64_t rounds = 0, refusing = 0;
    std::printf("from seed %llu\n", static_cast<unsigned long long>(seed));
    for (; elapsed() < seconds; ++rounds) refusing += run_once(seed++);
    std::printf("%llu rounds of 40 damaged streams in %.0f s, %llu with refusals; no complaint\n",
                static_cast<unsigned long long>(rounds), elapsed(), static_cast<unsigned long long>(refusing));
}
