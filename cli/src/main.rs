//! `tensor-relay`: streams tensors between containers over QUIC or TCP. The implementation is in `lib.rs`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// The global allocator: mimalloc, because QUIC allocates 64 KiB for each received batch and frees it soon after.
/// glibc's allocator returns such memory to the system each time, so that the next allocation causes page faults again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tensor_relay_cli::run(&std::env::args_os().collect::<Vec<_>>(), None).into()
}
