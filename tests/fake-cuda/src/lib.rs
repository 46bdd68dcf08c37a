//! A CUDA driver without a GPU, for tests: it keeps the promises of CUDA's documentation, and no others.
//!
//! Programs that load `libcuda.so` get this library instead, if a test arranges it. It allocates memory and runs
//! streams and copies, so that whole programs run on it, and is as strict as the documentation allows:
//!
//! - copies are asynchronous: separate threads run them, one at a time per direction and device, in pieces, at a
//!   configurable rate. A program that does not wait may read torn bytes, or `0xA5` (`copying`);
//! - fresh device memory is filled with `0xD7` (`backing`), and its addresses fault when the CPU accesses them
//!   (`memory`);
//! - calls and work of streams can be made to fail or hang, once or permanently (`faults`), and copies can be
//!   held until a test releases them (`gates`);
//! - an asynchronous error corrupts its context permanently, and host functions are no longer called (`device`);
//! - memory can be shared with other processes by CUDA IPC (`ipc`, not across PID namespaces, which driver 580 permits)
//!   and by file descriptors (`virtual_memory`); both can be disabled (`options`);
//! - illegal uses are reported as violations: freeing under a copy, double free, use after free, calling CUDA in a host
//!   function, destroying a context under copies (`report`).
//!
//! It does not model the speed, copy engines and locks of NVIDIA's driver, and implements one interpretation of the
//! documentation. The tests in `tests/tests/fake_cuda/contract.rs` define that interpretation, and run on a real driver
//! too.
//!
//! It cannot be mistaken for NVIDIA's driver. Its file has another name, `cuInit` finds no device unless
//! `TENSOR_RELAY_FAKE_CUDA=1` is set or a test has enabled it (`control`), its device names say that they are fake, and
//! no package contains it.
//!
//! One lock guards all state (`state`), which is simple, and fast enough for tests.

#[cfg(not(target_os = "linux"))]
compile_error!("The fake CUDA driver is for tests on Linux.");

mod api;
mod backing;
mod call;
mod control;
mod copying;
mod device;
mod event;
mod faults;
mod gates;
mod host_memory;
mod ipc;
mod memory;
mod options;
mod report;
mod state;
mod status;
mod stream;
mod uses;
mod virtual_memory;
