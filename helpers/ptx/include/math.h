// NVRTC has no such header, and knows by itself what a kernel needs of it.
