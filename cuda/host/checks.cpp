// Where a kernel that was built with g++'s checks of undefined behaviour ends when one fails: with a fault that names
// the place. The two structures are those of the compiler's calls into its own library, whose part this takes.
#include "runtime.h"

namespace {

struct Place {
  const char* file;
  unsigned line, column;
};
struct Type {
  unsigned short kind, info;
  char name[1];
};
struct Mismatch {
  Place place;
  const Type* type;
  unsigned char log_alignment, kind;
};

[[noreturn]] void broken(const char* what, const Place* place) {
  host::fault("%s at %s:%u", what, place->file, place->line);
}

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(Mismatch* data, uintptr_t address) {
  host::fault("address 0x%zx is not aligned for %s, which needs %u bytes, at %s:%u", static_cast<size_t>(address),
              data->type->name, 1u << data->log_alignment, data->place.file, data->place.line);
}
void __ubsan_handle_out_of_bounds(Place* place, uintptr_t index) {
  host::fault("index %lld is outside its array at %s:%u", static_cast<long long>(index), place->file, place->line);
}
void __ubsan_handle_add_overflow(Place* place, uintptr_t, uintptr_t) { broken("a signed sum overflows", place); }
void __ubsan_handle_sub_overflow(Place* place, uintptr_t, uintptr_t) { broken("a signed difference overflows", place); }
void __ubsan_handle_mul_overflow(Place* place, uintptr_t, uintptr_t) { broken("a signed product overflows", place); }
void __ubsan_handle_negate_overflow(Place* place, uintptr_t) { broken("a negation overflows", place); }
void __ubsan_handle_divrem_overflow(Place* place, uintptr_t, uintptr_t) { broken("a division by zero or overflow", place); }
void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t) {
  broken("a shift by more than the bits there are", place);
}

}
