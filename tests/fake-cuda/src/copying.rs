use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    device::Device,
    host_memory::HostRange,
    memory::{DeviceRange, Missing},
    state::{self, State},
    status::{Answer, Status},
    uses::Use,
};

/// The size of the pieces in which copies proceed, so that a program that does not wait observes partial copies.
const PIECE_BYTES: usize = 256 << 10;
/// The byte that fills page-locked memory when a copy to it is requested, until the copied bytes arrive.
const PENDING: u8 = 0xA5;

/// The direction of a copy. A device has one copy engine for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
}

impl Direction {
    pub(crate) const ALL: [Self; 3] = [Self::HostToDevice, Self::DeviceToHost, Self::DeviceToDevice];

    /// The name of this direction in faults and gates.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "@htod",
            Self::DeviceToHost => "@dtoh",
            Self::DeviceToDevice => "@dtod",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|direction| direction.name() == name)
    }
}

/// A copy between two memory ranges, which stay allocated until the copy has ended.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) direction: Direction,
    from: Place,
    to: Place,
    bytes: usize,
    /// The rows of a two-dimensional copy; `None` if all bytes are one row.
    rows: Option<Rows>,
    /// Records that this copy reads host memory.
    _reads: Option<Arc<()>>,
}

/// The shape of a two-dimensional copy within a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) from_pitch: usize,
    pub(crate) to_pitch: usize,
}

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of all known devices.
const PITCH_MAX: usize = i32::MAX as usize;

impl Rows {
    /// Checks the shape as the driver does. A pitch must have room for a row, even if there is only one.
    fn check(self) -> Answer {
        let is_possible = |pitch| (self.width..=PITCH_MAX).contains(&pitch);
        if is_possible(self.from_pitch) && is_possible(self.to_pitch) {
            Ok(())
        } else {
            Err(Status::INVALID_VALUE)
        }
    }

    /// The bytes from the first row to the last.
    fn span(self, pitch: usize) -> Answer<usize> {
        let before_last = self.height.saturating_sub(1).checked_mul(pitch);
        before_last
            .and_then(|bytes| bytes.checked_add(self.width))
            .ok_or(Status::INVALID_VALUE)
    }
}

#[derive(Debug)]
enum Place {
    /// Device memory or page-locked memory.
    Used { start: *mut u8, _used: Use },
    /// The caller's pageable memory. The call waits for the copy.
    Pageable(*mut u8),
    /// Bytes that were read from the caller's pageable memory before the call returned.
    Staged(Box<[u8]>),
}

// SAFETY: places are memory that is bound to no thread. Their bytes are shared with the program under test by the rules
// that this driver checks, and are accessed only through raw pointers.
unsafe impl Send for Place {}

impl Place {
    fn start(&mut self) -> *mut u8 {
        match self {
            Self::Used { start, .. } | Self::Pageable(start) => *start,
            Self::Staged(bytes) => bytes.as_mut_ptr(),
        }
    }

    fn of(range: DeviceRange) -> Self {
        Self::Used { start: range.start, _used: range.used }
    }
}

/// A copy that can be queued.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) copy: Copy,
    /// Whether the copy's host memory is pageable, so that the call may have to wait.
    pub(crate) pageable: bool,
}

/// Prepares a copy from host to device. Pageable memory is read before this returns.
pub(crate) fn from_host(
    state: &mut State,
    device: usize,
    to: u64,
    from: *const u8,
    bytes: usize,
) -> Answer<Prepared> {
    let to = Place::of(device_range(state, device, to, bytes)?);
    let (from, reads) = match host_range(state, from.cast_mut(), bytes)? {
        Some(place) => (place, Some(state.host.begin_read(from.addr(), bytes))),
        None => (Place::Staged(stage(from, bytes)), None),
    };
    let pageable = reads.is_none();
    let copy = Copy { _reads: reads, ..Copy::new(Direction::HostToDevice, from, to, bytes) };
    Ok(Prepared { copy, pageable })
}

/// Prepares a copy from device to host. Page-locked memory is overwritten at once, so that early reads are noticed, unless
/// an earlier copy still reads it.
pub(crate) fn to_host(
    state: &mut State,
    device: usize,
    to: *mut u8,
    from: u64,
    bytes: usize,
) -> Answer<Prepared> {
    let from = Place::of(device_range(state, device, from, bytes)?);
    let start = to.addr();
    let (to, pageable) = match host_range(state, to, bytes)? {
        Some(mut place) => {
            if !state.host.is_read(start, bytes) {
                fill(place.start(), PENDING, bytes);
            }
            (place, false)
        }
        None => (Place::Pageable(to), true),
    };
    Ok(Prepared { copy: Copy::new(Direction::DeviceToHost, from, to, bytes), pageable })
}

/// Prepares a copy within a device.
pub(crate) fn within(state: &mut State, device: usize, to: u64, from: u64, bytes: usize) -> Answer<Copy> {
    let to = Place::of(device_range(state, device, to, bytes)?);
    let from = Place::of(device_range(state, device, from, bytes)?);
    Ok(Copy::new(Direction::DeviceToDevice, from, to, bytes))
}

/// Prepares a copy of rows within a device.
pub(crate) fn rows_within(state: &mut State, device: usize, to: u64, from: u64, rows: Rows) -> Answer<Copy> {
    rows.check()?;
    let to = Place::of(device_range(state, device, to, rows.span(rows.to_pitch)?)?);
    let from = Place::of(device_range(state, device, from, rows.span(rows.from_pitch)?)?);
    let bytes = rows.width * rows.height;
    Ok(Copy { rows: Some(rows), ..Copy::new(Direction::DeviceToDevice, from, to, bytes) })
}

/// Prepares a copy of a batch, whose addresses tell its direction. Pageable memory is refused: a batch with it would not
/// be asynchronous.
pub(crate) fn between(state: &mut State, device: usize, to: u64, from: u64, bytes: usize) -> Answer<Copy> {
    let is_on_device = |address| state.devices[device].memory.extent(address).is_some();
    let host = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
    let Prepared { copy, pageable } = match (is_on_device(to), is_on_device(from)) {
        (true, true) => Prepared { copy: within(state, device, to, from, bytes)?, pageable: false },
        (true, false) => from_host(state, device, to, host(from), bytes)?,
        (false, true) => to_host(state, device, host(to), from, bytes)?,
        (false, false) => return Err(Status::INVALID_VALUE),
    };
    if pageable { Err(Status::INVALID_VALUE) } else { Ok(copy) }
}

/// Finds a range of device memory. Use after free is reported as a violation.
pub(crate) fn device_range(
    state: &mut State,
    device: usize,
    address: u64,
    bytes: usize,
) -> Answer<DeviceRange> {
    state.devices[device].memory.range(address, bytes).map_err(|missing| {
        if missing == Missing::Freed {
            state
                .report
                .violation(format!("device memory at {address:#x} is used after it was freed"));
        }
        Status::INVALID_VALUE
    })
}

/// Finds a range of page-locked memory; `None` for pageable memory.
fn host_range(state: &mut State, start: *mut u8, bytes: usize) -> Answer<Option<Place>> {
    match state.host.range(start.addr(), bytes) {
        HostRange::PageLocked(used) => Ok(Some(Place::Used { start, _used: used })),
        HostRange::Pageable if start.is_null() => Err(Status::INVALID_VALUE),
        HostRange::Pageable => Ok(None),
        HostRange::Mixed => Err(Status::INVALID_VALUE),
        HostRange::Freed => {
            state
                .report
                .violation(format!("page-locked memory at {start:p} is used after it was freed"));
            Err(Status::INVALID_VALUE)
        }
    }
}

fn stage(from: *const u8, bytes: usize) -> Box<[u8]> {
    let mut staged = vec![0; bytes];
    // SAFETY: the caller of the driver guarantees `bytes` readable bytes until the call returns; `staged` has as many.
    unsafe { from.copy_to_nonoverlapping(staged.as_mut_ptr(), bytes) };
    staged.into()
}

/// Fills a range that `device_range` or `host_range` returned.
pub(crate) fn fill(start: *mut u8, value: u8, bytes: usize) {
    // SAFETY: `device_range` or `host_range` checked the range, and its `Use` keeps it allocated.
    unsafe { start.write_bytes(value, bytes) };
}

/// How a copy runs: its speed, its injected fault, and the generation in which it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// The copy stops when a reset begins a later generation.
    pub(crate) generation: u64,
    /// The speed limit; 0 for none.
    pub(crate) bytes_per_second: f64,
    /// Whether the copy fails halfway.
    pub(crate) fails_halfway: bool,
}

impl Pace {
    pub(crate) fn of(state: &State, copy: &Copy, fails_halfway: bool) -> Self {
        let gbps = match copy.direction {
            Direction::HostToDevice => state.options.h2d_gbps,
            Direction::DeviceToHost => state.options.d2h_gbps,
            Direction::DeviceToDevice => 0.0,
        };
        Self { generation: state.generation, bytes_per_second: gbps * 1e9, fails_halfway }
    }
}

impl Copy {
    /// A copy of one row, which reads no page-locked memory.
    fn new(direction: Direction, from: Place, to: Place, bytes: usize) -> Self {
        Self { direction, from, to, bytes, rows: None, _reads: None }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The length of the piece after the first `copied` bytes, and its offsets at both ends.
    fn piece_at(&self, copied: usize) -> (usize, usize, usize) {
        match self.rows {
            None => (PIECE_BYTES, copied, copied),
            Some(Rows { width, from_pitch, to_pitch, .. }) => {
                let (row, column) = (copied / width, copied % width);
                (width - column, row * from_pitch + column, row * to_pitch + column)
            }
        }
    }

    /// Copies piece by piece. Called without the driver's lock.
    pub(crate) fn run(&mut self, pace: Pace) {
        let begun = Instant::now();
        let (from, to) = (self.from.start(), self.to.start());
        let end = if pace.fails_halfway { self.bytes / 2 } else { self.bytes };
        let mut copied = 0;
        while copied < end && state::is_current(pace.generation) {
            let (piece, from_offset, to_offset) = self.piece_at(copied);
            let piece = piece.min(end - copied);
            let (from, to) = (from.wrapping_add(from_offset), to.wrapping_add(to_offset));
            // SAFETY: device memory and page-locked memory were checked when the copy was requested. The copy's `Use`s
            // keep the driver's memory allocated, and the program guarantees its own. Device and host memory never
            // overlap. Two ranges of one device may overlap by an error of the caller, which `copy_to` allows.
            unsafe { from.copy_to(to, piece) };
            copied += piece;
            if pace.bytes_per_second > 0.0 {
                let due = Duration::from_secs_f64(copied as f64 / pace.bytes_per_second);
                thread::sleep(due.saturating_sub(begun.elapsed()));
            }
        }
    }
}

impl Device {
    /// Counts the copy if it succeeded, and frees the engine for the next one.
    pub(crate) fn copy_ended(&mut self, copy: &Copy, failed: bool) {
        let engine = &mut self.engines[copy.direction as usize];
        engine.busy = false;
        if !failed {
            engine.ended += 1;
            engine.ended_bytes += copy.bytes as u64;
        }
    }
}
