//! What processes beside the server publish through its socket, as it is told.

use super::Replaced;
use crate::{args::ServeArgs, units};
use anyhow::Context;
use std::io::Write;
use tensor_relay_server::{
    Device, Server, TopicOptions,
    beside::{Door, Open, Published},
};

/// Lets producers in, if that is wanted, until the result is dropped.
pub(super) fn open(
    server: &Server,
    args: &ServeArgs,
    device: Option<&Device>,
) -> anyhow::Result<Option<Open>> {
    let Some(path) = &args.publish_socket else { return Ok(None) };
    let door = Door::open(path, &args.publish_uid).context("cannot let other processes publish")?;
    // Versions follow one another here, whether or not files are watched.
    let options = TopicOptions { bases: args.bases, ..args.topic_options() };
    let as_json = args.json;
    Ok(Some(
        server.publish_from(door, options, device.cloned(), move |published| report(&published, as_json)),
    ))
}

fn report(Published { id, tensors, payload_bytes, path, reason, peer }: &Published, as_json: bool) {
    let (tensors_text, bytes) = (units::count(*tensors, "tensor"), units::bytes(*payload_bytes));
    eprintln!("{id}: {tensors_text}, {bytes}, from {peer} by {path}: {reason}");
    if as_json {
        let line = Replaced {
            event: "published",
            topic: id.topic.to_string(),
            epoch: id.epoch.to_string(),
            version: id.version.0,
            tensors: *tensors,
            payload_bytes: *payload_bytes,
            path: Some(path.name()),
            reason: Some(reason.clone()),
            from: Some(peer.clone()),
        };
        let mut out = std::io::stdout().lock();
        // Whoever started the server may have closed stdout; it serves all the same.
        let _ = serde_json::to_writer(&mut out, &line)
            .map_err(Into::into)
            .and_then(|()| writeln!(out));
        let _ = out.flush();
    }
}
