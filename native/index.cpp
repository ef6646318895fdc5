// The index of a tier; see index.hpp.

#include "index.hpp"

#include <algorithm>
#include <random>
#include <stdexcept>

namespace retain {

namespace {

constexpr std::size_t kFirstBuckets = 256;
constexpr std::size_t kArity = 4;  // of the heap: four children share a cache line of it

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    // The high and low half of a 64 x 64 bit product, by halves of 32 bits: portable, and fast enough beside the cache miss.
    const std::uint64_t a0 = a & 0xFFFFFFFFu, a1 = a >> 32, b0 = b & 0xFFFFFFFFu, b1 = b >> 32;
    const std::uint64_t low = a0 * b0, mid1 = a1 * b0, mid2 = a0 * b1, high = a1 * b1;
    const std::uint64_t carry = (low >> 32) + (mid1 & 0xFFFFFFFFu) + (mid2 & 0xFFFFFFFFu);
    return (a * b) ^ (high + (mid1 >> 32) + (mid2 >> 32) + (carry >> 32));
}

std::out_of_range no_record(Slot slot) {
    return std::out_of_range("slot " + std::to_string(slot) + " holds no record");
}

}  // namespace

Chains::Chains(Slot Record::*next, Key Record::*key) : next_(next), key_(key), low_(kFirstBuckets) {
    std::random_device entropy;
    for (auto& word : seed_) {
        word = (std::uint64_t{entropy()} << 32) | entropy();
    }
    for (std::size_t i = 0; i < kFirstBuckets; ++i) {
        heads_.push_back(kNone);
    }
}

std::uint64_t Chains::hash(const Key& key) const {
    return fold(key.words[0] ^ seed_[0], key.words[1] ^ seed_[1]) ^ fold(key.words[2] ^ seed_[2], key.words[3] ^ seed_[3]);
}

std::size_t Chains::bucket(std::uint64_t hash) const {
    const std::size_t wide = hash & (2 * low_ - 1);
    return wide < heads_.size() ? wide : hash & (low_ - 1);
}

Slot Chains::first(const Records& records, const Key& key) const {
    Slot slot = heads_[bucket(hash(key))];
    while (slot != kNone && records[slot].*key_ != key) {
        slot = records[slot].*next_;
    }
    return slot;
}

Slot Chains::next(const Records& records, Slot slot) const {
    const Key& key = records[slot].*key_;
    do {
        slot = records[slot].*next_;
    } while (slot != kNone && records[slot].*key_ != key);
    return slot;
}

Slot& Chains::link_to(Records& records, Slot slot) {
    Slot* link = &heads_[bucket(hash(records[slot].*key_))];
    while (*link != slot) {
        link = &(records[*link].*next_);
    }
    return *link;
}

void Chains::insert(Records& records, Slot slot) {
    if (entries_ >= heads_.size()) {
        split(records);
    }
    Slot& head = heads_[bucket(hash(records[slot].*key_))];
    records[slot].*next_ = head;
    head = slot;
    ++entries_;
}

void Chains::remove(Records& records, Slot slot) {
    link_to(records, slot) = records[slot].*next_;
    --entries_;
}

void Chains::replace(Records& records, Slot old, Slot by) {
    link_to(records, old) = by;
    records[by].*next_ = records[old].*next_;
}

void Chains::split(Records& records) {
    const std::size_t added = heads_.size();
    heads_.push_back(kNone);
    Slot* keep = &heads_[added - low_];
    Slot* move = &heads_[added];
    for (Slot slot = *keep; slot != kNone;) {
        const Slot following = records[slot].*next_;
        Slot*& tail = (hash(records[slot].*key_) & (2 * low_ - 1)) == added ? move : keep;
        *tail = slot;
        tail = &(records[slot].*next_);
        slot = following;
    }
    *keep = kNone;
    *move = kNone;
    if (heads_.size() == 2 * low_) {
        low_ *= 2;
    }
}

Index::Index(const std::string& policy)
    : by_key_(&Record::key_next, &Record::key), by_parent_(&Record::group_next, &Record::parent) {
    if (policy == "lru") {
        policy_ = Policy::kLru;
    } else if (policy == "lru-leaf") {
        policy_ = Policy::kLruLeaf;
    } else if (policy == "reuse-leaf") {
        policy_ = Policy::kReuseLeaf;
        forecast_.emplace();
        ghosts_.emplace();
    } else {
        throw std::invalid_argument("unknown eviction policy '" + policy + "'; known are reuse-leaf, lru-leaf and lru");
    }
}

Slot Index::insert(const Key& key, std::uint32_t form, std::uint32_t space, const Key& parent, std::uint64_t size,
                   std::uint64_t offset) {
    Slot slot = free_;
    if (slot == kNone) {
        if (records_.size() >= kNone) {
            throw std::length_error("an index holds at most 2**32 - 1 records");
        }
        slot = static_cast<Slot>(records_.size());
        ticks_.push_back(0);
        position_.push_back(kNone);
        records_.push_back(Record{});
    } else {
        free_ = records_[slot].key_next;
    }
    records_[slot] = Record{key, parent, size, offset, form, space, 0, 0, kNone, kNone, kNone, kNone, true, false, 0, 0};
    ticks_[slot] = ++clock_;
    position_[slot] = kNone;
    by_key_.insert(records_, slot);
    link(slot);
    ++totals_.count;
    totals_.bytes += size;
    add_to_space(records_[slot]);
    begin_wait(slot);
    reconsider(slot);
    return slot;
}

void Index::remove(Slot slot) {
    Record& record = at(slot);
    if (position_[slot] != kNone) {
        heap_remove(slot);
    }
    end_wait(slot);
    by_key_.remove(records_, slot);
    unlink(slot);
    leased_ -= record.refs > 0;
    pinned_ -= record.pinned;
    --totals_.count;
    totals_.bytes -= record.size;
    take_from_space(record);
    record.live = false;
    record.key_next = free_;
    free_ = slot;
}

Slot Index::find(const Key& key, std::uint32_t form) const {
    Slot slot = by_key_.first(records_, key);
    while (slot != kNone && records_[slot].form != form) {
        slot = by_key_.next(records_, slot);
    }
    return slot;
}

std::vector<Slot> Index::same_key(const Key& key) const {
    std::vector<Slot> found;
    for (Slot slot = by_key_.first(records_, key); slot != kNone; slot = by_key_.next(records_, slot)) {
        found.push_back(slot);
    }
    return found;
}

std::vector<Slot> Index::children(const Key& parent, std::size_t limit) const {
    std::vector<Slot> found;
    Slot slot = by_parent_.first(records_, parent);
    for (; slot != kNone && found.size() < limit; slot = records_[slot].sibling_next) {
        found.push_back(slot);
    }
    return found;
}

void Index::lookup(const char* keys, std::size_t count, const std::vector<std::uint32_t>& forms, Slot* out) const {
    for (std::size_t i = 0; i < count; ++i) {
        const Key key = Key::from(keys + i * kKeyBytes);
        std::size_t best = forms.size();
        out[i] = kNone;
        for (Slot slot = by_key_.first(records_, key); slot != kNone; slot = by_key_.next(records_, slot)) {
            const auto end = forms.begin() + static_cast<std::ptrdiff_t>(best);
            const auto found = std::find(forms.begin(), end, records_[slot].form);
            if (found != end) {
                best = static_cast<std::size_t>(found - forms.begin());
                out[i] = slot;
            }
        }
    }
}

std::vector<Slot> Index::slots(std::optional<std::uint32_t> space, std::optional<std::uint32_t> form) const {
    std::vector<Slot> found;
    for (std::size_t i = 0; i < records_.size(); ++i) {
        const Record& record = records_[i];
        if (record.live && (!space || record.space == *space) && (!form || record.form == *form)) {
            found.push_back(static_cast<Slot>(i));
        }
    }
    return found;
}

void Index::touch(const Slot* slots, std::size_t count) {
    check(slots, count);
    for (std::size_t i = 0; i < count; ++i) {
        const Slot slot = slots[i];
        Record& record = records_[slot];
        record.hits += record.hits != 0xFFFFFFFFu;
        if (policy_ == Policy::kReuseLeaf) {
            use_again(slot);
        } else {
            ticks_[slot] = ++clock_;
            if (position_[slot] != kNone) {
                sift_down(heap_of(slot), position_[slot]);
            }
        }
        to_front(slot);
    }
}

void Index::acquire(const Slot* slots, std::size_t count) {
    check(slots, count);
    for (std::size_t i = 0; i < count; ++i) {
        Record& record = records_[slots[i]];
        if (record.refs == 0xFFFFFFFFu) {
            release(slots, i);
            throw std::overflow_error("slot " + std::to_string(slots[i]) + " has too many leases");
        }
        if (record.refs++ == 0) {
            ++leased_;
            reconsider(slots[i]);
        }
    }
}

void Index::release(const Slot* slots, std::size_t count) {
    check(slots, count);
    for (std::size_t i = 0; i < count; ++i) {
        Record& record = records_[slots[i]];
        if (record.refs == 0) {
            acquire(slots, i);
            throw std::invalid_argument("slot " + std::to_string(slots[i]) + " has no lease to release");
        }
        if (--record.refs == 0) {
            --leased_;
            reconsider(slots[i]);
        }
    }
}

bool Index::pin(Slot slot) {
    Record& record = at(slot);
    if (record.pinned) {
        return false;
    }
    record.pinned = true;
    ++pinned_;
    reconsider(slot);
    return true;
}

bool Index::unpin(Slot slot) {
    Record& record = at(slot);
    if (!record.pinned) {
        return false;
    }
    record.pinned = false;
    --pinned_;
    reconsider(slot);
    return true;
}

void Index::set_parent(Slot slot, const Key& parent) {
    Record& record = at(slot);
    if (record.parent == parent) {
        return;
    }
    unlink(slot);
    record.parent = parent;
    link(slot);
}

void Index::set_space(Slot slot, std::uint32_t space) {
    Record& record = at(slot);
    take_from_space(record);
    record.space = space;
    add_to_space(record);
}

void Index::set_offset(Slot slot, std::uint64_t offset) { at(slot).offset = offset; }

Slot Index::victim() const {
    Slot least = kNone;
    double least_value = 0.0;
    for (const Heap& heap : heaps_) {
        if (heap.empty()) {
            continue;
        }
        const Slot slot = heap[0];
        if (!forecast_) {
            return slot;
        }
        const double value = forecast_->value(records_[slot].kind, ticks_[slot]);
        if (least == kNone || value < least_value || (value == least_value && before(slot, least))) {
            least = slot;
            least_value = value;
        }
    }
    if (least != kNone) {
        return least;
    }
    if (policy_ == Policy::kLru || leased_ != 0 || pinned_ != 0) {
        return kNone;
    }
    // Nothing is held and yet every record is some other's parent: records that lie about their parents form a circle. Let
    // the oldest go, lest they stay for ever.
    Slot oldest = kNone;
    for (std::size_t i = 0; i < records_.size(); ++i) {
        const Slot slot = static_cast<Slot>(i);
        if (records_[i].live && (oldest == kNone || before(slot, oldest))) {
            oldest = slot;
        }
    }
    return oldest;
}

const Record& Index::record(Slot slot) const {
    check(&slot, 1);
    return records_[slot];
}

std::uint64_t Index::tick(Slot slot) const {
    check(&slot, 1);
    return ticks_[slot];
}

Totals Index::space_totals(std::uint32_t space) const {
    const auto found = spaces_.find(space);
    return found == spaces_.end() ? Totals{} : found->second;
}

std::size_t Index::nbytes() const {
    // A node of the spaces' map: its pair, a link and the allocator's word.
    const std::size_t node = sizeof(std::pair<const std::uint32_t, Totals>) + 2 * sizeof(void*);
    std::size_t heaps = 0;
    for (const Heap& heap : heaps_) {
        heaps += heap.nbytes();
    }
    const std::size_t learned = (forecast_ ? forecast_->nbytes() : 0) + (ghosts_ ? ghosts_->nbytes() : 0);
    return sizeof(*this) + learned + records_.nbytes() + by_key_.nbytes() + by_parent_.nbytes() + ticks_.nbytes() +
           position_.nbytes() + heaps + spaces_.size() * node + spaces_.bucket_count() * sizeof(void*);
}

Record& Index::at(Slot slot) {
    check(&slot, 1);
    return records_[slot];
}

void Index::check(const Slot* slots, std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) {
        if (slots[i] >= records_.size() || !records_[slots[i]].live) {
            throw no_record(slots[i]);
        }
    }
}

void Index::add_to_space(const Record& record) {
    Totals& totals = spaces_[record.space];
    ++totals.count;
    totals.bytes += record.size;
}

void Index::take_from_space(const Record& record) {
    const auto totals = spaces_.find(record.space);
    totals->second.bytes -= record.size;
    if (--totals->second.count == 0) {
        spaces_.erase(totals);
    }
}

// A record that names itself as its parent is nobody's child; every other one is in its parent's group.
void Index::link(Slot slot) {
    Record& record = records_[slot];
    record.sibling_next = record.sibling_prev = record.group_next = kNone;
    if (record.parent == record.key) {
        return;
    }
    const Slot head = by_parent_.first(records_, record.parent);
    if (head == kNone) {
        by_parent_.insert(records_, slot);
        reconsider_all(record.parent);
    } else {
        by_parent_.replace(records_, head, slot);
        record.sibling_next = head;
        records_[head].sibling_prev = slot;
    }
}

void Index::unlink(Slot slot) {
    Record& record = records_[slot];
    if (record.parent == record.key) {
        return;
    }
    const Slot next = record.sibling_next, prev = record.sibling_prev;
    if (next != kNone) {
        records_[next].sibling_prev = prev;
    }
    if (prev != kNone) {
        records_[prev].sibling_next = next;
    } else if (next != kNone) {
        by_parent_.replace(records_, slot, next);
    } else {
        by_parent_.remove(records_, slot);
        reconsider_all(record.parent);
    }
}

void Index::to_front(Slot slot) {
    Record& record = records_[slot];
    if (record.sibling_prev == kNone) {
        return;
    }
    const Slot head = by_parent_.first(records_, record.parent);
    records_[record.sibling_prev].sibling_next = record.sibling_next;
    if (record.sibling_next != kNone) {
        records_[record.sibling_next].sibling_prev = record.sibling_prev;
    }
    by_parent_.replace(records_, head, slot);
    record.sibling_next = head;
    record.sibling_prev = kNone;
    records_[head].sibling_prev = slot;
}

bool Index::has_child(const Key& key) const { return by_parent_.first(records_, key) != kNone; }

void Index::reconsider_all(const Key& key) {
    if (policy_ == Policy::kLru) {
        return;
    }
    for (Slot slot = by_key_.first(records_, key); slot != kNone; slot = by_key_.next(records_, slot)) {
        reconsider(slot);
    }
}

std::uint64_t Index::ghost_name(const Record& record) const {
    // Unseeded: which ghosts share a bucket must not differ between runs, and a crowded bucket only forgets sooner.
    constexpr std::uint64_t a = 0x9E3779B97F4A7C15u, b = 0xBF58476D1CE4E5B9u, c = 0x94D049BB133111EBu;
    const auto& words = record.key.words;
    const std::uint64_t hash = fold(fold(words[0] ^ a, words[1] ^ b) ^ words[2] ^ c, words[3] ^ record.form ^ a);
    const std::uint64_t name = hash >> (64 - Ghosts::kNameBits);
    return name == 0 ? 1 : name;
}

void Index::begin_wait(Slot slot) {
    if (!forecast_) {
        return;
    }
    Record& record = records_[slot];
    forecast_->advance(clock_, totals_.count);
    const Ghosts::Ghost ghost = ghosts_->take(ghost_name(record));
    if (ghost.name != 0) {
        const auto uses = static_cast<std::uint8_t>(ghost.uses);
        forecast_->used(kind_of(uses), ghost.tick);
        record.uses = uses + (uses != 0xFFu);
    }
    record.kind = kind_of(record.uses);
    forecast_->wait(record.kind, clock_);
}

void Index::end_wait(Slot slot) {
    if (!forecast_) {
        return;
    }
    const Record& record = records_[slot];
    const Ghosts::Ghost forgotten = ghosts_->put({ghost_name(record), ticks_[slot], record.uses}, totals_.count);
    if (forgotten.name != 0) {
        forecast_->lost(kind_of(static_cast<std::uint8_t>(forgotten.uses)), forgotten.tick);
    }
}

void Index::use_again(Slot slot) {
    Record& record = records_[slot];
    const bool present = position_[slot] != kNone;
    if (present) {
        heap_remove(slot);
    }
    ++clock_;
    forecast_->advance(clock_, totals_.count);
    forecast_->used(record.kind, ticks_[slot]);
    ticks_[slot] = clock_;
    record.uses += record.uses != 0xFFu;
    record.kind = kind_of(record.uses);
    forecast_->wait(record.kind, clock_);
    if (present) {
        heap_push(slot);
    }
}

bool Index::candidate(Slot slot) const {
    const Record& record = records_[slot];
    return record.refs == 0 && !record.pinned && (policy_ == Policy::kLru || !has_child(record.key));
}

void Index::reconsider(Slot slot) {
    const bool wanted = candidate(slot), present = position_[slot] != kNone;
    if (wanted && !present) {
        heap_push(slot);
    } else if (!wanted && present) {
        heap_remove(slot);
    }
}

void Index::place(Heap& heap, std::size_t position, Slot slot) {
    heap[position] = slot;
    position_[slot] = static_cast<std::uint32_t>(position);
}

void Index::sift_up(Heap& heap, std::size_t position) {
    const Slot slot = heap[position];
    while (position > 0) {
        const std::size_t above = (position - 1) / kArity;
        if (!before(slot, heap[above])) {
            break;
        }
        place(heap, position, heap[above]);
        position = above;
    }
    place(heap, position, slot);
}

void Index::sift_down(Heap& heap, std::size_t position) {
    const Slot slot = heap[position];
    for (;;) {
        const std::size_t first = position * kArity + 1;
        if (first >= heap.size()) {
            break;
        }
        std::size_t least = first;
        for (std::size_t i = first + 1; i < std::min(first + kArity, heap.size()); ++i) {
            if (before(heap[i], heap[least])) {
                least = i;
            }
        }
        if (!before(heap[least], slot)) {
            break;
        }
        place(heap, position, heap[least]);
        position = least;
    }
    place(heap, position, slot);
}

void Index::heap_push(Slot slot) {
    Heap& heap = heap_of(slot);
    heap.push_back(slot);
    sift_up(heap, heap.size() - 1);
}

void Index::heap_remove(Slot slot) {
    Heap& heap = heap_of(slot);
    const std::size_t position = position_[slot];
    const Slot last = heap[heap.size() - 1];
    heap.pop_back();
    position_[slot] = kNone;
    if (last != slot) {
        place(heap, position, last);
        sift_up(heap, position);
        sift_down(heap, position_[last]);
    }
}

}  // namespace retain
