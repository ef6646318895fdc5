// The parts of the Python module that have files of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_ladder(nanobind::module_& module);
void bind_transform(nanobind::module_& module);
