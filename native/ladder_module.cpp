// What Python sees of the ladder's entropy coder: inputs are checked here.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "ladder.hpp"
#include "modules.hpp"

namespace nb = nanobind;

namespace {

using retain::ladder::Part;
using retain::ladder::Tables;

template <typename T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

using Numbers = Array<std::int16_t, 2>;
using Classes = Array<std::uint8_t, 1>;
using Expected = Array<const std::uint8_t, 1>;
using Shifts = Array<std::int8_t, 1>;

const retain::rans::Kernels& kernels_named(const std::optional<std::string>& name) {
    for (const auto* each : retain::rans::kernels()) {
        if (!name || *name == each->name) {
            return *each;
        }
    }
    throw std::invalid_argument("this processor has no path " + *name);
}

Part part_of(const Numbers& numbers, const Classes& classes, const Expected& expected, const Shifts& steps,
             const Shifts& energy) {
    const std::size_t components = numbers.shape(0), tokens = numbers.shape(1);
    if (components == 0 || tokens == 0 || classes.shape(0) != components || expected.shape(0) != components ||
        steps.shape(0) != tokens || energy.shape(0) != tokens) {
        throw std::invalid_argument("a part of " + std::to_string(components) + " components and " + std::to_string(tokens) +
                                    " tokens needs as many classes, steps and energies");
    }
    return {components, tokens, numbers.data(), classes.data(), expected.data(), steps.data(), energy.data()};
}

nb::list to_bytes(const std::vector<std::vector<std::uint8_t>>& streams) {
    nb::list made;
    for (const auto& stream : streams) {
        made.append(nb::bytes(reinterpret_cast<const char*>(stream.data()), stream.size()));
    }
    return made;
}

}  // namespace

void bind_ladder(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Tables>(module, "LadderTables")
        .def(
            "__init__",
            [](Tables* place, const Array<const std::uint16_t, 2>& frequencies, const Array<const std::uint16_t, 4>& splits,
               const Array<const std::uint8_t, 1>& first, const std::optional<std::string>& path) {
                using namespace retain::ladder;
                if (frequencies.shape(0) != kClasses + kSideTables || frequencies.shape(1) != retain::rans::kSymbols ||
                    splits.shape(0) != kLevels - 1 || splits.shape(1) != kClasses ||
                    splits.shape(2) != retain::rans::kContexts || splits.shape(3) != 2 || first.shape(0) != kLevels) {
                    throw std::invalid_argument("the ladder's tables do not have the shapes of its format");
                }
                new (place) Tables(frequencies.data(), splits.data(), first.data(), kernels_named(path));
            },
            "frequencies"_a, "splits"_a, "first"_a, "path"_a = nb::none())
        .def_prop_ro("path", [](const Tables& tables) { return tables.kernels().name; })
        .def(
            "encode",
            [](const Tables& tables, const Numbers& numbers, const Classes& classes, const Expected& expected,
               const Shifts& steps, const Shifts& energy, std::size_t level) {
                if (level >= retain::ladder::kLevels) {
                    throw std::invalid_argument("there is no level " + std::to_string(level));
                }
                const Part part = part_of(numbers, classes, expected, steps, energy);
                std::vector<std::vector<std::uint8_t>> streams;
                {
                    const nb::gil_scoped_release released;
                    streams = retain::ladder::encode(tables, part, level);
                }
                return to_bytes(streams);
            },
            "numbers"_a.noconvert(), "classes"_a.noconvert(), "expected"_a.noconvert(), "steps"_a.noconvert(),
            "energy"_a.noconvert(), "level"_a)
        .def(
            "decode",
            [](const Tables& tables, const std::vector<Expected>& streams, const Numbers& numbers, const Classes& classes,
               const Expected& expected, const Shifts& steps, const Shifts& energy) {
                const Part part = part_of(numbers, classes, expected, steps, energy);
                std::vector<retain::ladder::Bytes> bytes;
                for (const auto& stream : streams) {
                    bytes.push_back({stream.data(), stream.shape(0)});
                }
                const nb::gil_scoped_release released;
                retain::ladder::decode(tables, part, bytes);
            },
            "streams"_a, "numbers"_a.noconvert(), "classes"_a.noconvert(), "expected"_a.noconvert(),
            "steps"_a.noconvert(), "energy"_a.noconvert());
    module.def("rans_paths", [] {
        std::vector<std::string> names;
        for (const auto* each : retain::rans::kernels()) {
            names.emplace_back(each->name);
        }
        return names;
    });
}
