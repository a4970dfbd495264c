// What a kernel of ours needs of CUDA, on a processor: each thread of a block is a fiber, and one that comes to an
// exchange or a barrier lets the others come there, too. The lanes of a warp must come to the same exchanges.
#include <algorithm>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static

using std::max;
using std::min;

struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };

static dim gridDim, blockIdx, blockDim, threadIdx;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    unsigned exchanged[2], turn;
    bool finished;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::function<void()> body;

static void let_others() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

static void run_fiber()
{
    body();
    fibers[threadIdx.x].finished = true;
}

static void __syncthreads() { let_others(); }

static unsigned __shfl_xor_sync(unsigned, unsigned value, int apart)
{
    // Two places in turn, so that nobody writes what another has yet to read.
    const unsigned place = fibers[threadIdx.x].turn++ % 2;
    fibers[threadIdx.x].exchanged[place] = value;
    let_others();
    return fibers[threadIdx.x ^ apart].exchanged[place];
}

static void atomicXor(unsigned *place, unsigned value) { *place ^= value; }

static void run_grid(unsigned blocks, unsigned threads, std::function<void()> kernel)
{
    body = kernel;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        fibers.resize(threads);
        for (Fiber &fiber : fibers) {
            fiber.stack.resize(64 << 10);
            fiber.turn = 0;
            fiber.finished = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, run_fiber, 0);
        }
        for (unsigned left = threads; left > 0;)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
                Fiber &fiber = fibers[threadIdx.x];
                if (fiber.finished) continue;
                swapcontext(&scheduler, &fiber.context);
                left -= fiber.finished;
            }
    }
}
