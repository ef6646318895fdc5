// The Python module retain._native: inputs are checked here, and work is done in the other files.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "arena.hpp"
#include "index.hpp"
#include "modules.hpp"
#include "pages.hpp"

namespace nb = nanobind;

namespace {

using retain::Index;
using retain::Key;
using retain::kNone;
using retain::Slot;

using Slots = nb::ndarray<const Slot, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Key key_from(const nb::bytes& bytes, const char* what) {
    if (bytes.size() != retain::kKeyBytes) {
        throw std::invalid_argument(std::string(what) + " must be 32 bytes, got " + std::to_string(bytes.size()));
    }
    return Key::from(bytes.c_str());
}

nb::ndarray<nb::numpy, Slot, nb::ndim<1>> to_numpy(std::vector<Slot>&& values) {
    auto* kept = new std::vector<Slot>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Slot>*>(p); });
    return nb::ndarray<nb::numpy, Slot, nb::ndim<1>>(kept->data(), {kept->size()}, owner);
}

std::optional<Slot> or_none(Slot slot) { return slot == kNone ? std::nullopt : std::optional<Slot>(slot); }

// What Python sees of a record: a copy, so that it stays true to the moment it was asked for.
struct Entry {
    retain::Record record;
    std::uint64_t tick;
};

nb::bytes key_bytes(const Key& key) { return nb::bytes(key.data(), retain::kKeyBytes); }

void bind_index(nb::module_& module) {
    nb::class_<Entry>(module, "Record")
        .def_prop_ro("key", [](const Entry& e) { return key_bytes(e.record.key); })
        .def_prop_ro("parent", [](const Entry& e) { return key_bytes(e.record.parent); })
        .def_prop_ro("form", [](const Entry& e) { return e.record.form; })
        .def_prop_ro("space", [](const Entry& e) { return e.record.space; })
        .def_prop_ro("size", [](const Entry& e) { return e.record.size; })
        .def_prop_ro("offset", [](const Entry& e) { return e.record.offset; })
        .def_prop_ro("tick", [](const Entry& e) { return e.tick; })
        .def_prop_ro("refs", [](const Entry& e) { return e.record.refs; })
        .def_prop_ro("hits", [](const Entry& e) { return e.record.hits; })
        .def_prop_ro("pinned", [](const Entry& e) { return e.record.pinned; })
        .def("__repr__", [](const Entry& e) {
            const nb::object hex = key_bytes(e.record.key).attr("hex")();
            return "Record(key=" + nb::cast<std::string>(hex).substr(0, 12) + "..., form=" + std::to_string(e.record.form) +
                   ", size=" + std::to_string(e.record.size) + ", refs=" + std::to_string(e.record.refs) + ")";
        });

    using Many = void (Index::*)(const Slot*, std::size_t);
    const auto of_array = [](Many method) {
        return [method](Index& index, const Slots& slots) { (index.*method)(slots.data(), slots.size()); };
    };
    const auto of_list = [](Many method) {
        return [method](Index& index, const std::vector<Slot>& slots) { (index.*method)(slots.data(), slots.size()); };
    };

    nb::class_<Index>(module, "Index")
        .def(nb::init<const std::string&>(), nb::arg("policy"))
        .def(
            "insert",
            [](Index& index, const nb::bytes& key, std::uint32_t form, std::uint32_t space, const nb::bytes& parent,
               std::uint64_t size, std::uint64_t offset) {
                const Key own = key_from(key, "key");
                const Key above = key_from(parent, "parent");
                if (index.find(own, form) != kNone) {
                    throw nb::key_error(("the index already holds this key in form " + std::to_string(form)).c_str());
                }
                return index.insert(own, form, space, above, size, offset);
            },
            nb::arg("key"), nb::arg("form"), nb::arg("space"), nb::arg("parent"), nb::arg("size"), nb::arg("offset") = 0)
        .def("remove", &Index::remove, nb::arg("slot"))
        .def(
            "find",
            [](const Index& index, const nb::bytes& key, std::uint32_t form) {
                return or_none(index.find(key_from(key, "key"), form));
            },
            nb::arg("key"), nb::arg("form"))
        .def(
            "same_key", [](const Index& index, const nb::bytes& key) { return index.same_key(key_from(key, "key")); },
            nb::arg("key"))
        .def(
            "children",
            [](const Index& index, const nb::bytes& parent, std::size_t limit) {
                return index.children(key_from(parent, "parent"), limit);
            },
            nb::arg("parent"), nb::arg("limit"))
        .def(
            "lookup",
            [](const Index& index, const nb::bytes& keys, const std::vector<std::uint32_t>& forms) {
                if (keys.size() % retain::kKeyBytes != 0) {
                    throw std::invalid_argument("keys must be 32 bytes each, got " + std::to_string(keys.size()) + " in all");
                }
                std::vector<Slot> found(keys.size() / retain::kKeyBytes);
                index.lookup(keys.c_str(), found.size(), forms, found.data());
                return to_numpy(std::move(found));
            },
            nb::arg("keys"), nb::arg("forms"))
        .def("touch", of_array(&Index::touch), nb::arg("slots").noconvert())
        .def("touch", of_list(&Index::touch), nb::arg("slots"))
        .def("acquire", of_array(&Index::acquire), nb::arg("slots").noconvert())
        .def("acquire", of_list(&Index::acquire), nb::arg("slots"))
        .def("release", of_array(&Index::release), nb::arg("slots").noconvert())
        .def("release", of_list(&Index::release), nb::arg("slots"))
        .def("pin", &Index::pin, nb::arg("slot"))
        .def("unpin", &Index::unpin, nb::arg("slot"))
        .def("victim", [](const Index& index) { return or_none(index.victim()); })
        .def(
            "record", [](const Index& index, Slot slot) { return Entry{index.record(slot), index.tick(slot)}; },
            nb::arg("slot"))
        .def(
            "set_parent",
            [](Index& index, Slot slot, const nb::bytes& parent) { index.set_parent(slot, key_from(parent, "parent")); },
            nb::arg("slot"), nb::arg("parent"))
        .def("set_space", &Index::set_space, nb::arg("slot"), nb::arg("space"))
        .def("set_offset", &Index::set_offset, nb::arg("slot"), nb::arg("offset"))
        .def(
            "slots",
            [](const Index& index, std::optional<std::uint32_t> space, std::optional<std::uint32_t> form) {
                return to_numpy(index.slots(space, form));
            },
            nb::arg("space") = nb::none(), nb::arg("form") = nb::none())
        .def(
            "space_bytes",
            [](const Index& index, std::uint32_t space) {
                const retain::Totals totals = index.space_totals(space);
                return std::pair(totals.count, totals.bytes);
            },
            nb::arg("space"))
        .def_prop_ro("count", [](const Index& index) { return index.totals().count; })
        .def_prop_ro("bytes", [](const Index& index) { return index.totals().bytes; })
        .def_prop_ro("leased", &Index::leased)
        .def_prop_ro("pinned", &Index::pinned)
        .def_prop_ro("nbytes", &Index::nbytes)
        .def("__len__", [](const Index& index) { return index.totals().count; });
}

void bind_arena(nb::module_& module) {
    using retain::Arena;
    nb::class_<Arena>(module, "Arena")
        .def(nb::init<std::uint64_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("span"))
        .def(
            "take",
            [](Arena& arena, std::uint64_t size) -> std::optional<std::pair<std::uint64_t, std::vector<retain::Range>>> {
                auto taken = arena.take(size);
                if (!taken) {
                    return std::nullopt;
                }
                return std::pair(taken->offset, std::move(taken->idle));
            },
            nb::arg("size"))
        .def("give", &Arena::give, nb::arg("offset"))
        .def("fresh", &Arena::fresh, nb::arg("size"))
        .def_prop_ro("capacity", &Arena::capacity)
        .def_prop_ro("span", &Arena::span)
        .def_prop_ro("used", &Arena::used)
        .def_prop_ro("idle", &Arena::idle);
}

using Table = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Checks an array and a range of tokens against a layout; the layout itself was checked when it was made.
template <typename Array>
std::pair<retain::Canonical, retain::TokenRange> checked(const retain::PageLayout& layout, const Array& array,
                                                         const Table& table, std::size_t first, std::size_t start,
                                                         std::size_t count) {
    const auto item = static_cast<std::int64_t>(layout.item);
    const std::size_t rows = *std::max_element(layout.rows.begin(), layout.rows.end()) + 1;
    if (array.dtype().bits != 8 * layout.item || array.shape(0) < rows || array.shape(1) != layout.heads ||
        array.shape(3) != layout.dim || array.stride(3) != 1 ||
        array.stride(2) != static_cast<std::int64_t>(layout.dim)) {
        throw std::invalid_argument("the array does not fit these pages: it must be [layers, " + std::to_string(layout.heads) +
                                    ", tokens, " + std::to_string(layout.dim) + "] of " + std::to_string(layout.item) +
                                    "-byte numbers, with each head's tokens together");
    }
    if (start > array.shape(2) || count > array.shape(2) - start) {
        throw std::invalid_argument("the tokens lie beyond the array");
    }
    if (first > table.shape(0) * layout.page_tokens || count > table.shape(0) * layout.page_tokens - first) {
        throw std::invalid_argument("the tokens lie beyond the table of pages");
    }
    for (std::size_t i = first / layout.page_tokens; i * layout.page_tokens < first + count; ++i) {
        if (table.data()[i] < 0 || static_cast<std::size_t>(table.data()[i]) >= layout.pages) {
            throw std::invalid_argument("the table names page " + std::to_string(table.data()[i]) + " of " +
                                        std::to_string(layout.pages));
        }
    }
    char* data = const_cast<char*>(static_cast<const char*>(static_cast<const void*>(array.data())));
    return {{data, array.stride(0) * item, array.stride(1) * item}, {table.data(), first, start, count}};
}

void bind_pages(nb::module_& module) {
    using retain::PageLayout;
    using Writable = nb::ndarray<nb::ndim<4>, nb::device::cpu>;
    using ReadOnly = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
    nb::class_<PageLayout>(module, "Pages")
        .def(
            "__init__",
            [](PageLayout* place, std::vector<std::uintptr_t> bases, std::vector<std::size_t> rows, std::size_t pages,
               std::size_t page_tokens, std::size_t heads, std::size_t dim, std::size_t item, std::ptrdiff_t page_stride,
               std::ptrdiff_t head_stride, std::ptrdiff_t token_stride, std::ptrdiff_t dim_stride, bool pairs) {
                if (bases.empty() || bases.size() != rows.size()) {
                    throw std::invalid_argument("pages need at least one layer, and one row a layer");
                }
                if (pages == 0 || page_tokens == 0 || heads == 0 || dim == 0) {
                    throw std::invalid_argument("pages, their tokens, heads and dimensions must be above zero");
                }
                if (item != 1 && item != 2 && item != 4) {
                    throw std::invalid_argument("numbers must be of 1, 2 or 4 bytes, got " + std::to_string(item));
                }
                if (pairs && (dim % 2 != 0 || dim_stride != static_cast<std::ptrdiff_t>(item))) {
                    throw std::invalid_argument("pairs are of an even number of dimensions that lie together");
                }
                new (place) PageLayout{std::move(bases), std::move(rows), pages, page_tokens, heads, dim, item,
                                       page_stride, head_stride, token_stride, dim_stride, pairs};
            },
            nb::kw_only(), nb::arg("bases"), nb::arg("rows"), nb::arg("pages"), nb::arg("page_tokens"), nb::arg("heads"),
            nb::arg("dim"), nb::arg("item"), nb::arg("page_stride"), nb::arg("head_stride"), nb::arg("token_stride"),
            nb::arg("dim_stride"), nb::arg("pairs") = false)
        .def(
            "gather",
            [](const PageLayout& layout, const Writable& array, const Table& table, std::size_t first, std::size_t start,
               std::size_t count) {
                const auto [canonical, range] = checked(layout, array, table, first, start, count);
                const nb::gil_scoped_release released;
                retain::gather(layout, canonical, range);
            },
            nb::arg("array").noconvert(), nb::arg("table").noconvert(), nb::arg("first"), nb::arg("start"), nb::arg("count"))
        .def(
            "scatter",
            [](const PageLayout& layout, const ReadOnly& array, const Table& table, std::size_t first, std::size_t start,
               std::size_t count) {
                const auto [canonical, range] = checked(layout, array, table, first, start, count);
                const nb::gil_scoped_release released;
                retain::scatter(layout, canonical, range);
            },
            nb::arg("array").noconvert(), nb::arg("table").noconvert(), nb::arg("first"), nb::arg("start"),
            nb::arg("count"));
}

// A buffer of Python's, held while it is worked on.
class Buffer {
  public:
    Buffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw nb::python_error();
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* data() const { return static_cast<char*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_;
};

// Below this a copy takes less time than getting the GIL back from a busy thread might.
constexpr std::size_t kReleaseFrom = 256 << 10;

void copy(nb::handle target, nb::handle source) {
    const Buffer to(target, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    const Buffer from(source, PyBUF_C_CONTIGUOUS);
    if (to.size() != from.size()) {
        throw std::invalid_argument("cannot copy " + std::to_string(from.size()) + " bytes into " +
                                    std::to_string(to.size()));
    }
    if (to.size() == 0) {
        return;
    }
    if (to.size() < kReleaseFrom) {
        std::memmove(to.data(), from.data(), to.size());
    } else {
        const nb::gil_scoped_release released;
        std::memmove(to.data(), from.data(), to.size());
    }
}

void populate(nb::handle buffer) {
    const Buffer memory(buffer, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    const nb::gil_scoped_release released;
    for (std::size_t at = 0; at < memory.size(); at += retain::Arena::kPage) {
        __atomic_fetch_or(memory.data() + at, char{0}, __ATOMIC_RELAXED);
    }
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The native part of retain.";
    // Threads that run until the interpreter ends hold objects of this module: that is no leak worth a warning.
    nb::set_leak_warnings(false);
    bind_index(module);
    bind_arena(module);
    bind_pages(module);
    bind_ladder(module);
    bind_transform(module);
    module.def("copy", &copy, nb::arg("target"), nb::arg("source"));
    module.def("populate", &populate, nb::arg("buffer"));
}
