// A program around kernels, for builds with a sanitizer: reads one launch from a file, writes the buffers to another.
// Without arguments it prints the kernels' parameters.
// Each buffer is an allocation of its own and of its own size, so AddressSanitizer sees the first byte beside it.
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(HOST_ASAN)
#include <sanitizer/asan_interface.h>
#endif

#include "launch.h"

namespace {

FILE* file;

void read(void* to, size_t bytes) {
  if (fread(to, 1, bytes, file) != bytes) {
    fprintf(stderr, "the launch file is cut short\n");
    exit(2);
  }
}
template <typename T>
T read() {
  T value;
  read(&value, sizeof value);
  return value;
}

enum Kind : int { kValue, kBuffer, kAlias };  // kAlias: the buffer of an earlier argument

struct Argument {
  char* data;  // of a value, or of a buffer
  size_t bytes;
  Kind kind;
};

char* new_buffer(size_t bytes, size_t misalignment) {
  char* memory = static_cast<char*>(malloc(misalignment + bytes));
#if defined(HOST_ASAN)
  if (misalignment) __asan_poison_memory_region(memory, misalignment);
#endif
  return memory + misalignment;
}

}  // namespace

int main(int count, char** paths) {
  if (count == 1) return fputs(host_describe(), stdout) < 0;
  file = fopen(paths[1], "rb");
  if (!file) return 2;
  host::Launch launch = {};
  launch.kernel = read<int>();
  launch.grid = read<dim3>();
  launch.block = read<dim3>();
  launch.shared_bytes = read<uint64_t>();
  launch.seed = read<uint64_t>();
  launch.schedule = read<int>();
  launch.stride = 1;
  std::vector<host::Variable> variables(read<unsigned>());
  for (auto& variable : variables) variable = read<host::Variable>();
  launch.num_variables = static_cast<int>(variables.size());
  launch.variables = variables.data();

  std::vector<Argument> arguments(read<unsigned>());
  std::vector<void*> pointers(arguments.size());  // what a pointer argument holds
  std::vector<void*> values(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    Argument& argument = arguments[i];
    argument.kind = read<Kind>();
    argument.bytes = read<uint64_t>();
    const auto number = read<uint64_t>();  // misalignment of a buffer, or the argument that an alias means
    const auto offset = read<uint64_t>();  // of the address that the kernel gets, from the buffer's begin
    if (argument.kind == kAlias) {
      argument.data = arguments[number].data;
    } else {
      argument.data = new_buffer(argument.bytes, number);
      read(argument.data, argument.bytes);
    }
    pointers[i] = argument.data + offset;
    values[i] = argument.kind == kValue ? static_cast<void*>(argument.data) : &pointers[i];
  }
  launch.arguments = values.data();
  fclose(file);

  if (const char* error = host_launch(&launch)) {
    fprintf(stderr, "%s\n", error);
    return 3;
  }
  file = fopen(paths[2], "wb");
  for (const Argument& argument : arguments)
    if (argument.kind == kBuffer) fwrite(argument.data, 1, argument.bytes, file);
  return fclose(file) ? 2 : 0;
}
