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

/// The rates of plain copies, in 10^9 bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    to_host: Rates,
    to_device: Rates,
}

#[derive(Debug, Clone, Copy)]
struct Rates {
    locked: f64,
    pageable: f64,
}

impl Plain {
    /// The rate with page-locked memory.
    pub(super) fn locked(self, direction: Direction) -> f64 {
        self.rates(direction).locked
    }

    /// The rate with ordinary (pageable) memory.
    pub(super) fn pageable(self, direction: Direction) -> f64 {
        self.rates(direction).pageable
    }

    /// The rate of the slower direction with page-locked memory: the limit of any pipeline through the device.
    pub(super) fn slower(self) -> f64 {
        self.to_host.locked.min(self.to_device.locked)
    }

    fn rates(self, direction: Direction) -> Rates {
        match direction {
            Direction::ToHost => self.to_host,
            Direction::ToDevice => self.to_device,
        }
    }
}

/// Measures copies of `bytes`, but at most 256 MiB. `None` for the host engine, which has no driver.
pub(super) fn measure(device: DeviceArg, bytes: u64) -> Result<Option<Plain>> {
    let DeviceArg::Cuda(ordinal) = device else { return Ok(None) };
    let len = usize::try_from(bytes.min(COPY_BYTES_MAX))?;
    let rates = |pages| -> Result<[f64; 2]> {
        let PlainCopies { to_host_s, to_device_s } = plain_copies(ordinal, len, pages)?;
        Ok([to_host_s, to_device_s].map(|seconds| len as f64 / seconds / 1e9))
    };
    let (locked, pageable) = (rates(Pages::Locked)?, rates(Pages::Pageable)?);
    let rates_of = |direction: usize| Rates { locked: locked[direction], pageable: pageable[direction] };
    Ok(Some(Plain { to_host: rates_of(0), to_device: rates_of(1) }))
}

/// The maximum size of a copy: large enough that the cost of starting it does not matter.
const COPY_BYTES_MAX: u64 = 256 << 20;
