// Interleaved rANS: 32 coders side by side, symbols by static tables of 12-bit frequencies.
//
// Jarek Duda, "Asymmetric numeral systems" (arXiv 1311.2540); interleaving after Fabian Giesen, "Interleaved entropy
// coders" (arXiv 1402.3392). States have 32 bits and are refilled with 16-bit little-endian words. A row is a run of
// symbols; symbol i of a row belongs to lane i mod 32, and lanes refill in ascending order. Encoding goes backwards:
// the last row first. Every path (portable, AVX2, AVX-512) gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace retain::rans {

constexpr std::size_t kLanes = 32;
constexpr unsigned kBits = 12;
constexpr std::uint32_t kTotal = 1U << kBits;
constexpr std::uint32_t kLow = 1U << 16;  // states stay in [kLow, 2^32) and begin at kLow
constexpr std::size_t kSymbols = 128;     // of a table: the numbers -63 .. 63, and the escape
constexpr std::int32_t kZero = 63;        // the symbol of the number 0
constexpr std::int32_t kEscape = 127;     // stands for a number that has no symbol; decoded as kEscape - kZero
constexpr std::size_t kContexts = 4;      // of a refinement: min(|number so far|, 3)

// Which table each symbol of a row uses: that of class `own` + shift[i], held between `low` and `high`.
struct Classes {
    std::int32_t own, low, high;
    const std::int32_t* shift;
};

struct Decoder {
    alignas(64) std::uint32_t state[kLanes];
    const std::uint8_t* at;
    const std::uint8_t* end;
};

struct Encoder {
    alignas(64) std::uint32_t state[kLanes];
    std::uint8_t* at;  // words lie from here upwards; room for one word a symbol, and 32 more, lies below
    std::vector<std::int16_t> escapes;  // numbers that had no symbol, last first
};

// A way to code rows. Tables: `decode` [class][4096] of frequency << 20 | place in the symbol << 8 | symbol;
// `encode` [class][128] of frequency | start << 16; `splits` [class][4] of start of 0 | start of +1 << 16.
// Decoding gives false where the words run out; nothing is read beyond them.
struct Kernels {
    const char* name;
    bool (*decode)(Decoder&, const std::uint32_t* decode, Classes, std::size_t count, std::int16_t* numbers);
    bool (*refine)(Decoder&, const std::uint32_t* splits, Classes, std::size_t count, std::int16_t* numbers);
    void (*encode)(Encoder&, const std::uint32_t* encode, Classes, std::size_t count, const std::int16_t* numbers);
    // `numbers` are coarse * 3 + {-1, 0, 1}; the coarse one is what the decoder knows.
    void (*encode_refinement)(Encoder&, const std::uint32_t* splits, Classes, std::size_t count,
                              const std::int16_t* numbers);
};

// Those that this processor can run, the fastest first; the portable one is the last.
const std::vector<const Kernels*>& kernels();

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// One step (at most 32 symbols) of each, lane by lane: the definition, and what the others use at the end of the words.
bool decode_step(Decoder&, const std::uint32_t* decode, Classes, std::size_t lanes, std::int16_t* numbers);
bool refine_step(Decoder&, const std::uint32_t* splits, Classes, std::size_t lanes, std::int16_t* numbers);

// The number of the next coarser quantiser: the nearest integer to number / 3.
inline std::int32_t coarser(std::int32_t number) {
    return number >= 0 ? (number + 1) / 3 : -((1 - number) / 3);
}

}  // namespace retain::rans
