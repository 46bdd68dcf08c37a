//! Plain copies by the driver, which measure the limit of the bus.

use super::engine::DeviceArg;
use anyhow::Result;
use tensor_relay_device::cuda::measure::{Pages, PlainCopies, plain_copies};

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::ToHost, Self::ToDevice];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ToHost => "D2H",
            Self::ToDevice => "H2D",
        }
    }
}

/// The rates of plain copies in 10^9 bytes per second, from and to page-locked and pageable memory, each in both
/// [directions](Direction::BOTH).
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    pub(super) locked: [f64; 2],
    pub(super) pageable: [f64; 2],
}

/// Measures copies of `bytes`, but at most 256 MiB. `None` for the host engine, which has no driver.
pub(super) fn measure(device: DeviceArg, bytes: u64) -> Result<Option<Plain>> {
    let DeviceArg::Cuda(ordinal) = device else { return Ok(None) };
    let len = usize::try_from(bytes.min(COPY_BYTES_MAX))?;
    let rates = |pages| -> Result<[f64; 2]> {
        let PlainCopies { to_host_s, to_device_s } = plain_copies(ordinal, len, pages)?;
        Ok([to_host_s, to_device_s].map(|seconds| len as f64 / seconds / 1e9))
    };
    Ok(Some(Plain { locked: rates(Pages::Locked)?, pageable: rates(Pages::Pageable)? }))
}

/// The maximum size of a copy: large enough that the cost of starting it does not matter.
const COPY_BYTES_MAX: u64 = 256 << 20;
