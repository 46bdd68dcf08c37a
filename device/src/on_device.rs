use std::{any::Any, ops::Range, sync::Arc};

use bytes::Bytes;

use crate::{
    Device, DeviceBuffer,
    cuda::share::{ExportedCopy, ShareError},
    pool::SlotPool,
    source::{BoxFuture, Source, SourceError},
};

/// A payload in memory of a device: each part in one piece. Clones are cheap.
#[derive(Debug, Clone)]
pub struct OnDevice {
    device: Device,
    len_bytes: u64,
    parts: Arc<[(Range<u64>, DeviceBuffer)]>,
}

impl OnDevice {
    pub(crate) fn new(device: Device, len_bytes: u64, parts: Vec<(Range<u64>, DeviceBuffer)>) -> Self {
        Self { device, len_bytes, parts: parts.into() }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A copy of the payload for one other process: [`Device::export_copy`], with what is kept until the
    /// device has ended the copy. Blocks for as long as the device takes.
    ///
    /// # Errors
    /// [`ShareError`].
    pub fn export_copy(
        &self,
        may_use_handle: bool,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> Result<ExportedCopy, ShareError> {
        self.device.export_copy(self.len_bytes, &self.parts, may_use_handle, kept)
    }
}

/// A source whose bytes lie on a device as `on_device` says.
#[derive(Debug)]
pub(crate) struct DeviceSource {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) on_device: OnDevice,
}

impl Source for DeviceSource {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        self.source.read(range)
    }

    fn slots(&self) -> Option<&SlotPool> {
        self.source.slots()
    }

    fn on_device(&self) -> Option<&OnDevice> {
        Some(&self.on_device)
    }
}
