"""ltx_inductor: a torch.compile pass that puts fused kernels into unchanged LTX video models, with eager's bits."""

__version__ = "0.1.0"
