//! Receives versions into the user's device memory.

use super::{FillCause, FillError, Filled, Received};
use crate::{
    BufferError, Buffers, DeviceError, Snapshot, Subscription,
    buffers::{Fit, copy_yielding},
    destination::{Destination, SnapshotMemory},
    device_snapshot::{COPIES_AT_ONCE, pieces},
};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream::FuturesUnordered};
use std::{future::pending, ops::Range};
use tensor_relay_device::{Device, DeviceBuffer, HostBytes, HostMemory, Sink, SinkError, Source};

impl Subscription {
    /// Waits for the next version like [`next_into`](Self::next_into), and receives it directly into `buffers` on a
    /// device: each chunk is copied to its place as soon as it is verified, slot by slot. The buffers are all on one
    /// device, which may differ from the [configured](crate::Config::device) one.
    ///
    /// Like `next_into`, **it is not atomic**, and every error says whether the buffers are torn. A copy to a device
    /// cannot be cancelled, so a buffer is returned only when every copy to it has ended, and withheld
    /// ([`FillError::withheld`]) if that is unknown or takes more than 30 seconds. If your own work on this memory may
    /// still be queued on a GPU stream, register a fence with the GPU's engine before the call.
    ///
    /// # Errors
    /// Those of [`next_into`](Self::next_into). A device failure also tears the buffers.
    pub async fn next_into_device(
        &mut self,
        buffers: Buffers<DeviceBuffer>,
    ) -> Result<Filled<DeviceBuffer>, FillError<DeviceBuffer>> {
        self.next_into_device_until(buffers, pending()).await
    }

    /// [`next_into_device`](Self::next_into_device) that ends when `stop` does, as
    /// [`next_into_until`](Self::next_into_until) does for host memory.
    ///
    /// # Errors
    /// Those of [`next_into_device`](Self::next_into_device).
    pub async fn next_into_device_until(
        &mut self,
        buffers: Buffers<DeviceBuffer>,
        stop: impl Future<Output = ()> + Send,
    ) -> Result<Filled<DeviceBuffer>, FillError<DeviceBuffer>> {
        let (lent, lender) = buffers.lend_on_device();
        let (mut taken, mut buffers) = match self.receive_into(lent, lender, stop).await? {
            Received::InPlace(filled) => return Ok(filled),
            Received::Elsewhere(taken, buffers) => (taken, buffers),
        };
        if let Some(version) = &taken.version {
            buffers = version.copy_to_device(buffers).await?;
        }
        let (version, gap) = self.finish_taken(&mut taken);
        Ok(Filled { version, gap, copied: true, buffers })
    }
}

impl Snapshot {
    /// Copies tensors from host or device memory into the caller's device memory, by name. Only a device failure or a
    /// cancellation during the copy can tear these buffers: a failed transfer yields no snapshot.
    ///
    /// All names and sizes are checked first, so that either every tensor is copied or none, unless the device fails.
    /// The bytes pass through the device's slots. If cancelled, it leaves some tensors copied.
    ///
    /// # Errors
    /// [`FillCause::Buffers`] names the first buffer that does not fit; nothing was copied. [`FillCause::Device`]
    /// leaves the content of the buffers unspecified, and a late copy may still write to them: drop them; their memory
    /// is reused when that copy has ended. [`FillCause::Subscription`] does not occur.
    pub async fn copy_into_device(&self, buffers: &Buffers<DeviceBuffer>) -> Result<(), FillCause> {
        let copied = self.copy_to_device(buffers.clone()).await;
        copied.map(drop).map_err(|failed| failed.cause)
    }

    /// Copies to `buffers`, and returns when every copy has ended.
    async fn copy_to_device(
        &self,
        buffers: Buffers<DeviceBuffer>,
    ) -> Result<Buffers<DeviceBuffer>, FillError<DeviceBuffer>> {
        let fits = match self.match_buffers(&buffers) {
            Ok(fits) => fits,
            Err(error) => {
                // Buffers on several devices are the caller's mistake, so the version is not refused.
                let is_version_refused = !matches!(error, BufferError::SeveralDevices { .. });
                let refused = is_version_refused.then(|| self.id.clone());
                return Err(FillError {
                    cause: error.into(),
                    torn: None,
                    refused,
                    buffers,
                    withheld: vec![],
                });
            }
        };
        let (lent, lender) = buffers.lend_on_device();
        let no_memory =
            SnapshotMemory { memory: HostMemory::new(0), staging: HostMemory::new(0), is_volatile: false };
        // The buffers match, so `None` means that all of them are empty.
        let copied = match Destination::for_copy(&self.selection, lent, &no_memory) {
            Some(destination) => self.copy_all(&fits, &destination).await,
            None => Ok(()),
        };
        let (buffers, withheld) = lender.reclaim().await;
        match copied {
            Ok(()) => Ok(buffers),
            Err(error) => {
                let torn = Some(self.id.clone());
                Err(FillError { cause: error.into(), torn, refused: None, buffers, withheld })
            }
        }
    }

    /// Matches buffers with tensors. The buffers must be on one device.
    fn match_buffers(&self, buffers: &Buffers<DeviceBuffer>) -> Result<Vec<Fit>, BufferError> {
        let sized = buffers.iter().map(|(name, buffer)| (name.as_str(), buffer.len_bytes()));
        let fits = buffers.expected().fit(&self.selection, sized)?;
        check_device(buffers)?;
        Ok(fits)
    }

    async fn copy_all(&self, fits: &[Fit], destination: &Destination) -> Result<(), DeviceError> {
        let Some(device) = destination.device() else { return Ok(()) };
        let (sink, source) = (destination.sink(&self.id), self.device_source()?);
        let mut copies = FuturesUnordered::new();
        for piece in split_at_slots(fits, device.slots().slot_bytes()) {
            if copies.len() == COPIES_AT_ONCE {
                copies.next().await.transpose()?;
            }
            copies.push(self.copy_piece(piece, source.as_deref(), &*sink, device));
        }
        copies.try_collect().await
    }

    async fn copy_piece(
        &self,
        piece: Piece,
        source: Option<&dyn Source>,
        sink: &dyn Sink,
        device: &Device,
    ) -> Result<(), DeviceError> {
        let bytes = self.read_piece(&piece, source).await?;
        let copied = write_piece(sink, piece.range, &bytes).await;
        copied.map_err(|source| DeviceError::copy_in(&self.id, device, source))
    }

    /// Reads a piece of a tensor into ordinary memory, so that no slot of one device is occupied while waiting for a
    /// slot of another.
    async fn read_piece(&self, piece: &Piece, source: Option<&dyn Source>) -> Result<HostBytes, DeviceError> {
        let range = piece.range.clone();
        match source {
            Some(source) => {
                let read = source.read(range).await.map_err(|source| self.copy_out_error(source))?;
                Ok(Bytes::copy_from_slice(&read).into())
            }
            None => {
                let bytes = self.bytes_at(piece.tensor).expect("it fits");
                let start = piece.tensor_start;
                Ok(bytes.slice((range.start - start) as usize..(range.end - start) as usize))
            }
        }
    }
}

/// A part of a tensor that fits one slot.
#[derive(Debug)]
struct Piece {
    /// The tensor's index in the manifest.
    tensor: usize,
    /// The start of the tensor, and the range of the piece, in the selected bytes.
    tensor_start: u64,
    range: Range<u64>,
}

/// Splits each matched tensor into pieces of at most one slot.
fn split_at_slots(fits: &[Fit], slot_bytes: usize) -> Vec<Piece> {
    let split = |Fit { tensor, range }: &Fit| {
        let (tensor, tensor_start) = (*tensor, range.start);
        pieces(range.clone(), slot_bytes).map(move |range| Piece { tensor, tensor_start, range })
    };
    fits.iter().flat_map(split).collect()
}

async fn write_piece(sink: &dyn Sink, piece: Range<u64>, bytes: &HostBytes) -> Result<(), SinkError> {
    let mut target = sink.open(piece).await?;
    copy_yielding(bytes, &mut target).await;
    sink.write(target).await
}

fn check_device(buffers: &Buffers<DeviceBuffer>) -> Result<(), BufferError> {
    let mut all = buffers.iter();
    let Some((first_name, first)) = all.next() else { return Ok(()) };
    match all.find(|(_, buffer)| !buffer.device().is(first.device())) {
        Some((name, _)) => {
            Err(BufferError::SeveralDevices { name: name.as_str().into(), other: first_name.as_str().into() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can_be_spawned(_: impl Future + Send) {}

    /// Compiles only if futures that wait for a device can be spawned.
    #[expect(dead_code, reason = "checked by the compiler alone")]
    fn users_may_spawn(snapshot: &Snapshot, subscription: &mut Subscription, buffers: Buffers<DeviceBuffer>) {
        can_be_spawned(snapshot.to_host());
        can_be_spawned(snapshot.copy_into_device(&buffers));
        can_be_spawned(subscription.next_into(Buffers::<Vec<u8>>::new()));
        can_be_spawned(subscription.next_into_device(buffers));
    }

    #[test]
    fn tensors_are_split_at_slots() {
        let fits = [Fit { tensor: 3, range: 256..1256 }, Fit { tensor: 4, range: 0..0 }];
        let ranges: Vec<_> = split_at_slots(&fits, 400).into_iter().map(|piece| piece.range).collect();
        assert_eq!(ranges, [256..656, 656..1056, 1056..1256]);
    }
}
