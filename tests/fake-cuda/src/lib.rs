//! A CUDA driver without a GPU: what CUDA's documentation promises, and nothing that it does not.
//!
//! Programs that load `libcuda.so` get this library instead, when a test wants it. It keeps memory, runs streams, and
//! copies for real, so that whole programs run on it; and it is as unkind as the documentation allows:
//!
//! - asynchronous copies really are: threads of their own run them, one at a time per direction and device, in pieces,
//!   at a rate that can be chosen. Who does not wait sees torn bytes, and who reads early sees `0xA5` (`copying`);
//! - fresh device memory is full of `0xD7`, and its addresses fault when the CPU touches them (`memory`);
//! - any call and any execution can be made to fail or to hang, once or from then on (`faults`), and copies can be held
//!   back until a test lets them go (`gates`);
//! - an asynchronous error spoils its context for good, and host functions are not called any more (`device`);
//! - memory is shared with other processes for real, by CUDA IPC (`ipc`) and by file descriptors (`virtual_memory`), under
//!   the rules of the real driver, and can be made to be nothing that may be shared (`options`);
//! - what no program may do is written down as a violation: freeing under a copy, freeing twice, using what was freed,
//!   calling CUDA in a host function, destroying a context under copies (`report`).
//!
//! It proves nothing about speed, copy engines or NVIDIA's locks, and it holds one reading of the documentation. The
//! tests in `tests/tests/fake_cuda/contract.rs` say what that reading is, and run on a real driver too.
//!
//! It cannot be taken for a driver by mistake. Its file has another name, `cuInit` finds no device unless
//! `TENSOR_RELAY_FAKE_CUDA=1` is in the environment or a test has allowed it (`control`), its devices say what they are,
//! and it is part of no package.
//!
//! Everything that is known lies behind one lock (`state`). Nothing else has to be thought about, and tests are not in a
//! hurry.

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
