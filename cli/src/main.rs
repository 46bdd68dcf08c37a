//! `tensor-relay`: streams tensors between containers over QUIC or TCP. The implementation is in `lib.rs`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// mimalloc, because QUIC allocates 64 KiB for each received batch and frees it a moment later. glibc's allocator
/// returns such memory to the system each time; the page faults of the next allocation took a tenth of all CPU time in
/// measurements.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tensor_relay_cli::run(&std::env::args_os().collect::<Vec<_>>(), None).into()
}
