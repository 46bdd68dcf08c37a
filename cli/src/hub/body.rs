//! [`HubBody`]: what is sent: a text, or a file as its parts arrive.

use super::{blocks::Blocks, failure::Failure, version::HubVersion};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use std::{
    ops::Range,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

/// The size of the pieces in which a file is sent: what a connection keeps in memory, about three times.
const PIECE_BYTES: u64 = 64 << 10;

/// The body of an answer.
pub(super) enum HubBody {
    /// A text, until it was sent.
    Text(Option<Bytes>),
    File(FileBody),
}

impl From<String> for HubBody {
    fn from(text: String) -> Self {
        Self::Text(Some(text.into()))
    }
}

impl HubBody {
    /// Nothing, as for a request of method `HEAD`.
    pub(super) fn empty() -> Self {
        Self::Text(None)
    }
}

/// A range of a file. Its last bytes are sent only when all of the range before them was received and verified. If a part
/// does not arrive, the connection is closed: the client sees that bytes are missing, and may ask for them.
pub(super) struct FileBody {
    version: Arc<HubVersion>,
    file: usize,
    /// What was not sent yet, in the file.
    rest: Range<u64>,
    blocks: Arc<Blocks>,
    readers: Arc<Readers>,
    reading: Option<Reading>,
}

/// A part of a file that is being read.
type Reading = Pin<Box<dyn Future<Output = Result<Bytes, Failure>> + Send>>;

/// The number of files that are being sent.
#[derive(Debug, Default)]
pub(super) struct Readers(AtomicUsize);

impl FileBody {
    /// Reads the first piece, so that an answer with a status can say why there is none.
    ///
    /// # Errors
    /// [`Failure`] when it does not arrive.
    pub(super) async fn begin(
        version: Arc<HubVersion>,
        (file, range): (usize, Range<u64>),
        blocks: &Arc<Blocks>,
        readers: &Arc<Readers>,
    ) -> Result<Self, Failure> {
        readers.0.fetch_add(1, Ordering::Relaxed);
        let (blocks, readers) = (Arc::clone(blocks), Arc::clone(readers));
        let mut body = Self { version, file, rest: range, blocks, readers, reading: None };
        let Some(reading) = body.next() else { return Ok(body) };
        let first = reading.await?;
        body.reading = Some(Box::pin(std::future::ready(Ok(first))));
        Ok(body)
    }

    /// Begins to read the next piece, and asks for what follows; `None` at the end.
    fn next(&mut self) -> Option<Reading> {
        let piece = self.rest.start..self.rest.end.min(self.rest.start + PIECE_BYTES);
        if piece.is_empty() {
            return None;
        }
        self.version.keep();
        self.prefetch();
        let (blocks, version, file) = (Arc::clone(&self.blocks), Arc::clone(&self.version), self.file);
        Some(Box::pin(async move { blocks.read_file(&version, file, piece).await }))
    }

    fn prefetch(&self) {
        let Some(file) = self.version.files().get(self.file) else { return };
        let Some(block) = self.version.block(0) else { return };
        let block_bytes = block.payload.end - block.payload.start;
        let ahead = self.blocks.ahead(block_bytes, self.readers.0.load(Ordering::Relaxed));
        for number in 1..=ahead {
            let at = self.rest.start + number * block_bytes;
            if at >= self.rest.end {
                // The last bytes may begin a block.
                self.version.prefetch(file, self.rest.end - 1, &self.blocks);
                return;
            }
            self.version.prefetch(file, at, &self.blocks);
        }
    }
}

impl Drop for FileBody {
    fn drop(&mut self) {
        self.readers.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Body for HubBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let file = match self.get_mut() {
            Self::Text(text) => return Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::File(file) => file,
        };
        let reading = match file.reading.take() {
            Some(reading) => Some(reading),
            None => file.next(),
        };
        let Some(reading) = reading else { return Poll::Ready(None) };
        let read = ready!(file.reading.insert(reading).as_mut().poll(context));
        file.reading = None;
        Poll::Ready(Some(match read {
            Ok(bytes) => {
                file.rest.start += bytes.len() as u64;
                Ok(Frame::data(bytes))
            }
            Err(failure) => {
                tracing::warn!(
                    version = %file.version.id, error = %failure,
                    "The hub closes the connection of a download, which may be continued: a part of the file did not arrive."
                );
                file.rest.start = file.rest.end;
                Err(failure)
            }
        }))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Text(text) => text.is_none(),
            Self::File(file) => file.reading.is_none() && file.rest.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(match self {
            Self::Text(text) => text.as_ref().map_or(0, |text| text.len() as u64),
            Self::File(file) => file.rest.end - file.rest.start,
        })
    }
}
