// Switching between stacks: a few instructions on x86-64, ucontext elsewhere. Only scheduler.cpp
// includes this, after its variables.
#pragma once

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
// The registers that a function must preserve, and the stack pointer, are all there is to save.
__asm__(R"(
.text
.type emulator_switch, @function
emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save, void* to);

static void start(Lane& lane) {
    void** top = reinterpret_cast<void**>(lane.stack + STACK_BYTES);
    *--top = nullptr;  // a function begins 8 bytes off a multiple of 16
    *--top = reinterpret_cast<void*>(fiber);
    lane.context = top - 6;  // six registers of any value
}
#else
#include <ucontext.h>
static ucontext_t scheduler_context;
static std::vector<ucontext_t> contexts;

static void emulator_switch(void** save, void* to) {
    ucontext_t* from = save == &scheduler ? &scheduler_context : &contexts[current->thread];
    *save = from;
    swapcontext(from, static_cast<ucontext_t*>(to));
}

static void start(Lane& lane) {
    contexts.resize(lanes.size());
    ucontext_t& context = contexts[lane.thread];
    getcontext(&context);
    context.uc_stack.ss_sp = lane.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, fiber, 0);
    lane.context = &context;
}
#endif
