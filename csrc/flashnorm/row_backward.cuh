// The kernels of a backward: one that reads everything once, two for what it does not serve, and the last fold.
//
//   backward_streams   rows of whole aligned groups, up to a width: gradients of rows, and partials
//   backward_columns   partials alone
//   backward_rows      gradients of rows alone, and of weights that belong to one row
//   backward_fold      from partials to dweight and dbias
//
// Which of them: ffi/backward_plan.h. No result depends on it.
#pragma once

#include "backward/columns.cuh"
#include "backward/fold.cuh"
#include "backward/rows.cuh"
#include "backward/streams.cuh"
