// What Python sees of the ladder's transform: shapes are checked here, and work is done without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "gemm.hpp"
#include "modules.hpp"
#include "transform.hpp"

namespace nb = nanobind;

namespace {

using namespace retain::transform;

template <typename T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <std::size_t N>
using Floats = Array<float, N>;
template <std::size_t N>
using Given = Array<const float, N>;
using Heads = nb::ndarray<nb::ndim<4>, nb::device::cpu>;
using ReadOnlyHeads = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Basis = Array<const std::uint16_t, 2>;
using Numbers = Array<std::int16_t, 2>;
// Cosine and sine [tokens, pairs] of a layer, and whether neighbouring dimensions pair; none where keys are not turned.
using Turns = std::vector<std::optional<std::tuple<Given<2>, Given<2>, bool>>>;

void must(bool holds, const char* what) {
    if (!holds) {
        throw std::invalid_argument(what);
    }
}

Kind kind_of(const std::string& dtype, std::size_t bits) {
    const Kind kind = dtype == "float32" ? Kind::kFloat32 : dtype == "float16" ? Kind::kFloat16 : Kind::kBfloat16;
    must(dtype == "float32" || dtype == "float16" || dtype == "bfloat16", "KV must be float32, float16 or bfloat16");
    must(bits == (kind == Kind::kFloat32 ? 32 : 16), "the array's numbers are not of the size of its dtype");
    return kind;
}

// All heads of an array [layers, heads, tokens, dim] with their angles, checked.
struct Checked {
    std::vector<Head> heads;
    std::vector<Angles> angles;
    std::size_t tokens, dim;
};

template <typename Any>
Checked checked(const Any& array, const std::string& dtype, const Turns& turns) {
    const Kind kind = kind_of(dtype, array.dtype().bits);
    const std::size_t layers = array.shape(0), heads = array.shape(1), tokens = array.shape(2), dim = array.shape(3);
    must(turns.size() == layers, "every layer needs its angles");
    must(dim >= 1 && dim <= kLargestHead && array.stride(3) == 1, "each head's numbers of a token must lie together");
    Checked found{{}, {}, tokens, dim};
    char* data = const_cast<char*>(static_cast<const char*>(static_cast<const void*>(array.data())));
    const std::ptrdiff_t item = kind == Kind::kFloat32 ? 4 : 2;
    for (std::size_t l = 0; l < layers; ++l) {
        Angles angles{nullptr, nullptr, 0, false};
        if (turns[l]) {
            const auto& [cosine, sine, interleaved] = *turns[l];
            must(cosine.shape(0) == tokens && sine.shape(0) == tokens && cosine.shape(1) == sine.shape(1) &&
                     2 * cosine.shape(1) <= dim,
                 "the angles do not fit the tokens and dimensions");
            angles = {cosine.data(), sine.data(), cosine.shape(1), interleaved};
        }
        for (std::size_t h = 0; h < heads; ++h) {
            const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(l) * array.stride(0) + static_cast<std::ptrdiff_t>(h) * array.stride(1);
            found.heads.push_back({data + at * item, kind, array.stride(2), tokens, dim});
            found.angles.push_back(angles);
        }
    }
    return found;
}

void check_rows(const Checked& found, const Given<1>& mean, const Given<1>& weight, const Floats<2>& rows, std::size_t at) {
    const std::size_t size = found.heads.size() * found.dim;
    must(mean.shape(0) == size && weight.shape(0) == size, "every dimension needs a mean and a weight");
    must(rows.shape(0) == found.tokens && at <= rows.shape(1) && size <= rows.shape(1) - at, "the rows are too small");
}

void check_basis(const Basis& basis, std::size_t stride) {
    must(basis.shape(0) == basis.shape(1), "a basis is square");
    must(stride % retain::gemm::kPad == 0 && stride >= basis.shape(0), "rows are padded to a multiple of 16");
}

}  // namespace

void bind_transform(nb::module_& module) {
    using namespace nb::literals;
    module.def(
        "ladder_gather",
        [](const ReadOnlyHeads& array, const std::string& dtype, const Turns& turns, const Given<1>& mean,
           const Given<1>& weight, const Floats<2>& rows, std::size_t at) {
            const Checked found = checked(array, dtype, turns);
            check_rows(found, mean, weight, rows, at);
            const nb::gil_scoped_release released;
            for (std::size_t i = 0; i < found.heads.size(); ++i) {
                const std::size_t from = i * found.dim;
                gather(found.heads[i], found.angles[i], mean.data() + from, weight.data() + from, rows.data() + at + from,
                       rows.shape(1));
            }
        },
        "array"_a.noconvert(), "dtype"_a, "turns"_a, "mean"_a.noconvert(), "weight"_a.noconvert(), "rows"_a.noconvert(),
        "at"_a);
    module.def(
        "ladder_scatter",
        [](const Heads& array, const std::string& dtype, const Turns& turns, const Given<1>& mean, const Given<1>& inverse,
           const Floats<2>& rows, std::size_t at) {
            const Checked found = checked(array, dtype, turns);
            check_rows(found, mean, inverse, rows, at);
            const nb::gil_scoped_release released;
            for (std::size_t i = 0; i < found.heads.size(); ++i) {
                const std::size_t from = i * found.dim;
                scatter(found.heads[i], found.angles[i], mean.data() + from, inverse.data() + from,
                        rows.data() + at + from, rows.shape(1));
            }
        },
        "array"_a.noconvert(), "dtype"_a, "turns"_a, "mean"_a.noconvert(), "inverse"_a.noconvert(), "rows"_a.noconvert(),
        "at"_a);
    module.def(
        "ladder_probe",
        [](const ReadOnlyHeads& array, const std::string& dtype, const Turns& turns, const Given<3>& probe,
           const Floats<3>& dots, const Floats<3>& norms) {
            const Checked found = checked(array, dtype, turns);
            const std::size_t heads = found.heads.size(), layers = array.shape(0);
            must(probe.shape(0) == layers && probe.shape(1) == array.shape(1) && probe.shape(2) >= found.dim,
                 "every head needs its probe");
            for (const auto* out : {&dots, &norms}) {
                must(out->shape(0) == layers && out->shape(1) == array.shape(1) && out->shape(2) == found.tokens,
                     "the results do not fit");
            }
            const nb::gil_scoped_release released;
            for (std::size_t i = 0; i < heads; ++i) {
                project(found.heads[i], found.angles[i], probe.data() + i * probe.shape(2), dots.data() + i * found.tokens,
                        norms.data() + i * found.tokens);
            }
        },
        "array"_a.noconvert(), "dtype"_a, "turns"_a, "probe"_a.noconvert(), "dots"_a.noconvert(), "norms"_a.noconvert());
    module.def(
        "ladder_project",
        [](const Basis& basis, const Given<2>& rows, const Floats<2>& values) {
            check_basis(basis, rows.shape(1));
            must(values.shape(0) == basis.shape(0) && values.shape(1) == rows.shape(0), "the components do not fit");
            const nb::gil_scoped_release released;
            retain::gemm::kernels().project(basis.data(), basis.shape(0), rows.data(), rows.shape(1), rows.shape(0),
                                            values.data());
        },
        "basis"_a.noconvert(), "rows"_a.noconvert(), "values"_a.noconvert());
    module.def(
        "ladder_quantise",
        [](const Given<2>& values, const Given<1>& scale, const Numbers& numbers, const Floats<1>& largest) {
            const std::size_t components = values.shape(0), tokens = values.shape(1);
            must(scale.shape(0) == tokens && numbers.shape(0) == components && numbers.shape(1) == tokens &&
                     largest.shape(0) == components,
                 "the numbers do not fit the components");
            const nb::gil_scoped_release released;
            for (std::size_t c = 0; c < components; ++c) {
                largest.data()[c] = quantise(values.data() + c * tokens, scale.data(), tokens, numbers.data() + c * tokens);
            }
        },
        "values"_a.noconvert(), "scale"_a.noconvert(), "numbers"_a.noconvert(), "largest"_a.noconvert());
    module.def(
        "ladder_sizes",
        [](const Given<2>& values, const Given<1>& share, const Floats<1>& sizes) {
            must(share.shape(0) == values.shape(1) && sizes.shape(0) == values.shape(0), "the sizes do not fit");
            const nb::gil_scoped_release released;
            for (std::size_t c = 0; c < values.shape(0); ++c) {
                sizes.data()[c] = loudness(values.data() + c * values.shape(1), share.data(), values.shape(1));
            }
        },
        "values"_a.noconvert(), "share"_a.noconvert(), "sizes"_a.noconvert());
    module.def(
        "ladder_loudness",
        [](const Given<2>& values, const Array<const std::uint32_t, 1>& components, const Given<1>& factors,
           const Floats<1>& sums) {
            must(components.shape(0) == factors.shape(0) && sums.shape(0) == values.shape(1), "the sums do not fit");
            for (std::size_t i = 0; i < components.shape(0); ++i) {
                must(components.data()[i] < values.shape(0), "there is no such component");
            }
            const nb::gil_scoped_release released;
            for (std::size_t i = 0; i < components.shape(0); ++i) {
                add_sizes(values.data() + components.data()[i] * values.shape(1), factors.data()[i], values.shape(1),
                          sums.data());
            }
        },
        "values"_a.noconvert(), "components"_a.noconvert(), "factors"_a.noconvert(), "sums"_a.noconvert());
    module.def(
        "ladder_spread",
        [](const Basis& basis, const Array<const std::int16_t, 2>& numbers, const Given<1>& scale,
           const std::optional<Given<2>>& predicted, const Floats<2>& rows) {
            check_basis(basis, rows.shape(1));
            const std::size_t width = basis.shape(0), tokens = numbers.shape(1);
            const std::size_t known = predicted ? predicted->shape(0) : 0;
            must(numbers.shape(0) == width && scale.shape(0) == tokens && rows.shape(0) == tokens && known <= width &&
                     (!predicted || predicted->shape(1) == tokens),
                 "the numbers do not fit the rows");
            const nb::gil_scoped_release released;
            std::vector<float> values;
            values.reserve(width * tokens);
            std::vector<std::uint32_t> used;
            for (std::size_t c = 0; c < width; ++c) {
                const std::size_t at = values.size();
                values.resize(at + tokens);
                if (!restore(numbers.data() + c * tokens, scale.data(), tokens, values.data() + at) && c >= known) {
                    values.resize(at);
                    continue;
                }
                for (std::size_t t = 0; c < known && t < tokens; ++t) {
                    values[at + t] += predicted->data()[c * tokens + t];
                }
                used.push_back(static_cast<std::uint32_t>(c));
            }
            retain::gemm::kernels().spread(basis.data(), width, used.data(), used.size(), values.data(), tokens,
                                           rows.data(), rows.shape(1));
        },
        "basis"_a.noconvert(), "numbers"_a.noconvert(), "scale"_a.noconvert(), "predicted"_a.none(), "rows"_a.noconvert());
}
