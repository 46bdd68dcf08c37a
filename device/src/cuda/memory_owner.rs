use std::{any::Any, fmt};

use super::{driver::IpcHandle, memory_cache::Block, virtual_memory::Mapped};
use crate::loan::Loan;

/// The owner of memory that was given out.
pub(super) enum MemoryOwner {
    /// Memory of the engine's own.
    Block(Block),
    /// Memory shared with another process.
    Shared(SharedMemory),
    /// A caller's memory: the value that keeps it, and its size.
    Caller(Box<dyn Any + Send + Sync>, u64),
    /// No memory.
    Nothing,
}

impl fmt::Debug for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(block) => block.fmt(f),
            Self::Shared(shared) => shared.fmt(f),
            Self::Caller(..) => f.write_str("Caller"),
            Self::Nothing => f.write_str("Nothing"),
        }
    }
}

/// Memory that is unmapped, or freed and not cached.
#[derive(Debug)]
pub(super) enum SharedMemory {
    /// A buffer of this engine, counted in its budget.
    Buffer(Mapped),
    /// A plain allocation of this engine that other processes may open, counted in its budget. It is freed, and never
    /// reused: a process that keeps it open would see what comes later.
    Openable(Block),
    /// Another process's buffer, on loan.
    Imported(Mapped, Loan),
    /// A part of another process's allocation, on loan.
    Opened(IpcHandle, Loan),
}
