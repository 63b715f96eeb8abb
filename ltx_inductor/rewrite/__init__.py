"""Pure graph code: the pass, the lifter, legality, one file per rule, report and dumps. No kernels, no devices."""
