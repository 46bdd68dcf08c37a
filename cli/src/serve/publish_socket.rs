//! The publish socket of `serve`, and reports of the versions that local processes publish through it.

use super::PublishedLine;
use crate::{args::ServeArgs, units};
use anyhow::Context;
use std::{
    io::{self, Write},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};
use tensor_relay_server::{
    Device, Server, TopicOptions,
    sidecar::{OpenSocket, PublishSocket, Published},
};

/// The maximum number of versions waiting to be reported. If the reader of the output is slow, versions beyond it are
/// not reported.
const QUEUE_MAX: usize = 256;

/// Opens the publish socket, if `args` name one, until the result is dropped.
pub(super) fn open(
    server: &Server,
    args: &ServeArgs,
    device: Option<&Device>,
) -> anyhow::Result<Option<OpenSocket>> {
    let Some(path) = &args.publish_socket else { return Ok(None) };
    let socket = PublishSocket::open(path, &args.publish_uid).context("cannot open the publish socket")?;
    // Unlike topics from files, topics of the socket have several versions even without `--watch`.
    let options = TopicOptions { bases: args.bases, expire_after: args.expire_after, ..args.topic_options() };
    let reports = spawn_reporter(args.json, io::stderr, io::stdout)?;
    Ok(Some(server.publish_from(socket, options, device.cloned(), move |published| {
        let _ = reports.try_send(published); // Dropped if the queue is full.
    })))
}

/// Spawns a thread that reports versions until the returned sender is dropped. The reader of a pipe may stop reading,
/// and the server's network thread must not wait for it.
fn spawn_reporter<E: Write, O: Write>(
    as_json: bool,
    err: impl FnOnce() -> E + Send + 'static,
    out: impl FnOnce() -> O + Send + 'static,
) -> io::Result<SyncSender<Published>> {
    let (sender, queue) = sync_channel(QUEUE_MAX);
    let run = move || report_all(&queue, as_json, &mut err(), &mut out());
    thread::Builder::new().name("relay-report".into()).spawn(run)?;
    Ok(sender)
}

fn report_all(queue: &Receiver<Published>, as_json: bool, err: &mut impl Write, out: &mut impl Write) {
    for published in queue {
        // Either output may be closed; the other one is still written.
        let _ = err.write_all(as_text(&published).as_bytes());
        if as_json {
            let _ = out.write_all(as_json_line(&published).as_bytes()).and_then(|()| out.flush());
        }
    }
}

fn as_text(Published { id, tensors, payload_bytes, path, reason, peer }: &Published) -> String {
    let (tensors, bytes) = (units::count(*tensors, "tensor"), units::bytes(*payload_bytes));
    format!("{id}: {tensors}, {bytes}, from {peer} through {path} ({reason:?})\n")
}

fn as_json_line(Published { id, tensors, payload_bytes, path, reason, peer }: &Published) -> String {
    let line = PublishedLine {
        event: "published",
        topic: id.topic.to_string(),
        epoch: id.epoch.to_string(),
        version: id.version.0,
        tensors: *tensors,
        payload_bytes: *payload_bytes,
        files: None,
        missed_generations: None,
        path: Some(path.name()),
        reason: Some(reason.clone()),
        from: Some(peer.clone()),
    };
    serde_json::to_string(&line).map_or_else(|_| String::new(), |line| line + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, TryRecvError, channel};
    use tensor_relay_client::{Epoch, Topic, Version, VersionId};
    use tensor_relay_server::sidecar::MemoryKind;

    /// A pipe whose writes block until the sender of `blocked` is dropped; with `None`, a closed pipe.
    struct Pipe {
        blocked: Option<Receiver<()>>,
        written: Sender<String>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let Some(blocked) = &self.blocked else { return Err(io::ErrorKind::BrokenPipe.into()) };
            let _ = blocked.recv();
            self.written
                .send(String::from_utf8_lossy(bytes).into_owned())
                .map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn published(version: u64) -> Published {
        let id =
            VersionId { topic: Topic::new("policy").unwrap(), epoch: Epoch(1), version: Version(version) };
        Published {
            id,
            tensors: 1,
            payload_bytes: 256,
            path: MemoryKind::Memfd,
            reason: "the tensors are in host memory".into(),
            peer: "process 7 of user 1".into(),
        }
    }

    /// Goal: a reader that stops does not block the server, and misses only the reports beyond the queue's capacity.
    /// Method: send more versions than fit while nothing is read, then read; stderr is closed.
    #[test]
    fn a_reader_that_stops_misses_reports_beyond_the_queue() {
        let (unblock, blocked) = channel();
        let (written, lines) = channel();
        let unread = channel().0;
        let err = || Pipe { blocked: None, written: unread };
        let reports = spawn_reporter(true, err, || Pipe { blocked: Some(blocked), written }).unwrap();
        for version in 0..2 * QUEUE_MAX as u64 {
            let _ = reports.try_send(published(version)); // Returns immediately.
        }
        assert_eq!(lines.try_recv(), Err(TryRecvError::Empty));
        drop((unblock, reports));
        let lines: Vec<String> = lines.iter().collect();
        assert!((QUEUE_MAX..QUEUE_MAX + 2).contains(&lines.len()), "{}", lines.len());
        assert!(lines[0].contains(r#""event":"published","topic":"policy""#), "{}", lines[0]);
    }
}
