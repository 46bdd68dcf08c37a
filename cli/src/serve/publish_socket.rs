//! Reports of versions that local processes publish through the server's socket.

use super::Replaced;
use crate::{args::ServeArgs, units};
use anyhow::Context;
use std::{
    io::{self, Write},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};
use tensor_relay_server::{
    Device, Server, TopicOptions,
    sidecar::{Open, PublishSocket, Published},
};

/// The most versions waiting to be reported. Further ones are left out for a slow reader.
const UNTOLD_MAX: usize = 256;

/// Lets producers in, if that is wanted, until the result is dropped.
pub(super) fn open(
    server: &Server,
    args: &ServeArgs,
    device: Option<&Device>,
) -> anyhow::Result<Option<Open>> {
    let Some(path) = &args.publish_socket else { return Ok(None) };
    let door = PublishSocket::open(path, &args.publish_uid).context("cannot let other processes publish")?;
    // Versions follow one another here, whether or not files are watched.
    let options = TopicOptions { bases: args.bases, expire_after: args.expire_after, ..args.topic_options() };
    let telling = teller(args.json, io::stderr, io::stdout)?;
    Ok(Some(server.publish_from(door, options, device.cloned(), move |published| {
        let _ = telling.try_send(published); // Nobody reads what is told, and the server serves all the same.
    })))
}

/// Tells of versions on a thread of its own, until what it returns is dropped: the reader of a pipe may stop to read, and
/// the server's one thread must not wait for that.
fn teller<E: Write, O: Write>(
    as_json: bool,
    err: impl FnOnce() -> E + Send + 'static,
    out: impl FnOnce() -> O + Send + 'static,
) -> io::Result<SyncSender<Published>> {
    let (telling, untold) = sync_channel(UNTOLD_MAX);
    let tell = move || tell(&untold, as_json, &mut err(), &mut out());
    thread::Builder::new().name("relay-tell".into()).spawn(tell)?;
    Ok(telling)
}

fn tell(untold: &Receiver<Published>, as_json: bool, err: &mut impl Write, out: &mut impl Write) {
    for published in untold {
        // Whoever started the server may have closed either; the other is written all the same.
        let _ = err.write_all(for_people(&published).as_bytes());
        if as_json {
            let _ = out.write_all(for_programs(&published).as_bytes()).and_then(|()| out.flush());
        }
    }
}

fn for_people(Published { id, tensors, payload_bytes, path, reason, peer }: &Published) -> String {
    let (tensors, bytes) = (units::count(*tensors, "tensor"), units::bytes(*payload_bytes));
    format!("{id}: {tensors}, {bytes}, from {peer} by {path}: {reason:?}\n")
}

fn for_programs(Published { id, tensors, payload_bytes, path, reason, peer }: &Published) -> String {
    let line = Replaced {
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

    /// A pipe that is not read until `open` is dropped, or that is closed.
    struct Stopped {
        open: Option<Receiver<()>>,
        written: Sender<String>,
    }

    impl Write for Stopped {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let Some(open) = &self.open else { return Err(io::ErrorKind::BrokenPipe.into()) };
            let _ = open.recv();
            self.written
                .send(String::from_utf8_lossy(bytes).into_owned())
                .map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn published(number: u64) -> Published {
        let id =
            VersionId { topic: Topic::new("policy").unwrap(), epoch: Epoch(1), version: Version(number) };
        Published {
            id,
            tensors: 1,
            payload_bytes: 256,
            path: MemoryKind::Memfd,
            reason: "the tensors are in host memory".into(),
            peer: "process 7 of user 1".into(),
        }
    }

    /// Goal: who reads nothing holds nobody up, and misses what does not fit; who reads then hears the rest.
    /// Method: more versions than may wait, while nothing is read; then read, with stderr closed.
    #[test]
    fn who_does_not_read_misses_some() {
        let (open, closed) = channel();
        let (written, lines) = channel();
        let nowhere = channel().0;
        let err = || Stopped { open: None, written: nowhere };
        let telling = teller(true, err, || Stopped { open: Some(closed), written }).unwrap();
        for number in 0..2 * UNTOLD_MAX as u64 {
            let _ = telling.try_send(published(number)); // Comes back at once.
        }
        assert_eq!(lines.try_recv(), Err(TryRecvError::Empty));
        drop((open, telling));
        let lines: Vec<String> = lines.iter().collect();
        assert!((UNTOLD_MAX..UNTOLD_MAX + 2).contains(&lines.len()), "{}", lines.len());
        assert!(lines[0].contains(r#""event":"published","topic":"policy""#), "{}", lines[0]);
    }
}
