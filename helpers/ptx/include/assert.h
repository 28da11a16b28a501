// NVRTC has no such header.
#pragma once
#define assert(condition) ((condition) ? (void)0 : __trap())
