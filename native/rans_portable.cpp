// Interleaved rANS, lane by lane: the definition of the format, for every processor.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "rans.hpp"

namespace retain::rans {
namespace {

inline std::int32_t class_of(const Classes& classes, std::size_t i) {
    return std::clamp(classes.own + classes.shift[i], classes.low, classes.high);
}

inline bool refill(Decoder& from, std::uint32_t& state) {
    if (state >= kLow) {
        return true;
    }
    if (from.end - from.at < 2) {
        return false;
    }
    state = state << 16 | static_cast<std::uint32_t>(from.at[0] | from.at[1] << 8);
    from.at += 2;
    return true;
}

inline void put(Encoder& into, std::size_t lane, std::uint32_t frequency, std::uint32_t start) {
    std::uint32_t state = into.state[lane];
    if (state >> (32 - kBits) >= frequency) {
        into.at -= 2;
        into.at[0] = static_cast<std::uint8_t>(state);
        into.at[1] = static_cast<std::uint8_t>(state >> 8);
        state >>= 16;
    }
    into.state[lane] = (state / frequency << kBits) + state % frequency + start;
}

bool decode(Decoder& from, const std::uint32_t* tables, Classes classes, std::size_t count, std::int16_t* numbers) {
    for (std::size_t i = 0; i < count; i += kLanes, classes.shift += kLanes) {
        if (!decode_step(from, tables, classes, std::min(kLanes, count - i), numbers + i)) {
            return false;
        }
    }
    return true;
}

bool refine(Decoder& from, const std::uint32_t* splits, Classes classes, std::size_t count, std::int16_t* numbers) {
    for (std::size_t i = 0; i < count; i += kLanes, classes.shift += kLanes) {
        if (!refine_step(from, splits, classes, std::min(kLanes, count - i), numbers + i)) {
            return false;
        }
    }
    return true;
}

void encode(Encoder& into, const std::uint32_t* tables, Classes classes, std::size_t count,
            const std::int16_t* numbers) {
    for (std::size_t i = count; i-- > 0;) {
        const std::uint32_t* table = tables + class_of(classes, i) * static_cast<std::int32_t>(kSymbols);
        const auto symbol = std::min(static_cast<std::uint32_t>(numbers[i] + kZero), std::uint32_t{kEscape});
        std::uint32_t entry = table[symbol];
        if (entry == 0 || symbol == kEscape) {
            entry = table[kEscape];
            into.escapes.push_back(numbers[i]);
        }
        put(into, i % kLanes, entry & 0xFFFF, entry >> 16);
    }
}

void encode_refinement(Encoder& into, const std::uint32_t* splits, Classes classes, std::size_t count,
                       const std::int16_t* numbers) {
    for (std::size_t i = count; i-- > 0;) {
        const std::int32_t known = coarser(numbers[i]);
        const std::int32_t digit = numbers[i] - 3 * known;
        const std::uint32_t split = splits[class_of(classes, i) * 4 + std::min(std::abs(known), 3)];
        const std::uint32_t bounds[] = {0, split & 0xFFFF, split >> 16, kTotal};
        const int part = (known < 0 ? -digit : digit) + 1;
        put(into, i % kLanes, bounds[part + 1] - bounds[part], bounds[part]);
    }
}

}  // namespace

bool decode_step(Decoder& from, const std::uint32_t* tables, Classes classes, std::size_t lanes,
                 std::int16_t* numbers) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        std::uint32_t& state = from.state[lane];
        const std::uint32_t entry = tables[(static_cast<std::uint32_t>(class_of(classes, lane)) << kBits) +
                                           (state & (kTotal - 1))];
        state = (entry >> 20) * (state >> kBits) + (entry >> 8 & (kTotal - 1));
        numbers[lane] = static_cast<std::int16_t>(static_cast<std::int32_t>(entry & 0xFF) - kZero);
        if (!refill(from, state)) {
            return false;
        }
    }
    return true;
}

bool refine_step(Decoder& from, const std::uint32_t* splits, Classes classes, std::size_t lanes,
                 std::int16_t* numbers) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        std::uint32_t& state = from.state[lane];
        const std::int32_t known = numbers[lane];
        const std::uint32_t split = splits[class_of(classes, lane) * 4 + std::min(std::abs(known), 3)];
        const std::uint32_t bounds[] = {0, split & 0xFFFF, split >> 16, kTotal};
        const std::uint32_t slot = state & (kTotal - 1);
        const int part = (slot >= bounds[1]) + (slot >= bounds[2]);
        state = (bounds[part + 1] - bounds[part]) * (state >> kBits) + slot - bounds[part];
        numbers[lane] = static_cast<std::int16_t>(3 * known + (known < 0 ? 1 - part : part - 1));
        if (!refill(from, state)) {
            return false;
        }
    }
    return true;
}

const Kernels kPortable = {"portable", decode, refine, encode, encode_refinement};

const std::vector<const Kernels*>& kernels() {
    static const std::vector<const Kernels*> found = [] {
        std::vector<const Kernels*> usable;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            usable.push_back(&kAvx512);
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) {
            usable.push_back(&kAvx2);
        }
#endif
        usable.push_back(&kPortable);
        return usable;
    }();
    return found;
}

}  // namespace retain::rans
