// The ladder's matrix products for every processor, and the choice among them.

#define RETAIN_TARGET

#include "gemm_blocks.hpp"

namespace retain::gemm {
namespace {

struct Portable {
    typedef float Vector __attribute__((vector_size(16)));
    static constexpr std::size_t kHigh = 4, kVectors = 2;

    static void widen(const std::uint16_t* from, float* to, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            // Exponents moved up and scaled back, which also makes subnormal numbers right; there are no others.
            const std::uint32_t bits = (from[i] & 0x8000U) << 16 | (from[i] & 0x7FFFU) << 13;
            float value;
            std::memcpy(&value, &bits, sizeof value);
            to[i] = value * 0x1p112F;
        }
    }
};

void project(const std::uint16_t* basis, std::size_t width, const float* numbers, std::size_t stride, std::size_t tokens,
             float* out) {
    Blocks<Portable>::project(basis, width, numbers, stride, tokens, out);
}

void spread(const std::uint16_t* basis, std::size_t width, const std::uint32_t* rows, std::size_t count,
            const float* values, std::size_t tokens, float* out, std::size_t stride) {
    Blocks<Portable>::spread(basis, width, rows, count, values, tokens, out, stride);
}

}  // namespace

const Kernels kPortable = {"portable", project, spread};

const Kernels& kernels() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return kAvx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return kAvx2;
    }
#endif
    return kPortable;
}

}  // namespace retain::gemm
