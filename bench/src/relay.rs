//! tensor-relay as a contender.

use crate::contender::{ReceiveArgs, ServeArgs};
use anyhow::{Result, bail};

/// Publishes generated tensors and sends them to whoever subscribes.
///
/// # Errors
/// Always, until the server room exists.
pub async fn serve(_args: ServeArgs) -> Result<()> {
    bail!("tensor-relay's serving side is not built yet: compare with --only stock-quinn")
}

/// Subscribes and receives every round into the same memory.
///
/// # Errors
/// Always, until the client room exists.
pub async fn receive(_args: ReceiveArgs) -> Result<()> {
    bail!("tensor-relay's receiving side is not built yet: compare with --only stock-quinn")
}
