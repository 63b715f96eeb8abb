// Stands before torch's own header of this name, which needs Python's headers. NATTEN's sources need only these.
#pragma once
#include <ATen/ATen.h>
#include <torch/types.h>
