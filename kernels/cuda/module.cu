// All kernels in one translation unit: one cubin for each architecture, one shared object for a
// host. The files stay apart because they are read apart.
#include "dequant.cu"
#include "gemm.cu"
#include "gemv.cu"
#include "layer.cu"
