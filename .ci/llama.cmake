# llama-cpp-python would also compile what llama.cpp's own programs share, which its library does not need. It sets
# this in the cache by force; a plain variable comes before that (CMake policy CMP0126).
set(LLAMA_BUILD_COMMON OFF)
