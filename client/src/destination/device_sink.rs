//! The sink for device memory, with a deadline for copies.

use super::OnDevice;
use std::{ops::Range, sync::Arc, time::Duration};
use tensor_relay_device::{BoxFuture, CopyError, EngineSink, PartsError, Sink, SinkError, Target};
use tokio::time::timeout;

/// The deadline for copying a chunk, after which its version is given up. Shorter than the stall timeout of both ends,
/// 30 s, so that the error names the device and not this client. Longer than a GPU's engine lets a copy wait for a
/// caller's stream, 20 s by default: so the engine's error, which names the late stream, comes first, although that
/// wait begins later.
const COPY_TIMEOUT: Duration = Duration::from_secs(25);

/// A sink in device memory whose copies have a deadline and hold references to their target buffers, so that lent
/// memory is not returned to its user during a copy.
#[derive(Debug)]
pub(crate) struct DeviceSink {
    inner: EngineSink,
    payload: Arc<OnDevice>,
}

impl DeviceSink {
    /// A sink for `payload`, of `len_bytes` including discarded ranges.
    pub(super) fn new(payload: Arc<OnDevice>, len_bytes: u64) -> Result<Self, PartsError> {
        Ok(Self { inner: payload.sink(len_bytes)?, payload })
    }

    /// Whether a chunk waits for a slot of the device or for an unfinished copy.
    pub(super) fn waits_for_device(&self) -> bool {
        self.inner.waits_for_device()
    }

    /// Ends writing. Fails while a chunk is being written, or if it is unknown whether a copy has ended.
    pub(super) fn commit(&self) -> Result<(), SinkError> {
        self.inner.commit()
    }

    async fn copy(&self, target: Target) -> Result<(), SinkError> {
        let range = target.range();
        let copying = self.inner.write_keeping(target, self.payload.overlapping(&range));
        let Ok(end) = timeout(COPY_TIMEOUT, copying).await else {
            let device = self.payload.device().name().into();
            return Err(CopyError::TimedOut { device, waited: COPY_TIMEOUT }.into());
        };
        if let Err(SinkError::Copy(error)) = &end
            && error.may_still_write()
        {
            self.payload.overlapping(&range).iter().for_each(|memory| memory.withhold());
        }
        end
    }
}

impl Sink for DeviceSink {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        self.inner.open(range)
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.copy(target))
    }
}
