//! `tensor-relay`: streams tensors between containers over QUIC. What it does is in `lib.rs`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// QUIC allocates 64 KiB for each batch that comes, and gives it back a moment later. glibc returns such memory to the
/// system and faults it in again: measured, that is a tenth of all CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tensor_relay_cli::run(&std::env::args_os().collect::<Vec<_>>(), None).into()
}
