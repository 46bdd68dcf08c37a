//! The publish socket of `serve`, and reports of the versions that local processes publish through it.

use super::{print_object, version_object};
use crate::{args::ServeArgs, units};
use anyhow::Context;
use tensor_relay_server::{
    Device, Server, TopicOptions,
    sidecar::{OpenSocket, PublishSocket, Published},
};

/// Opens the publish socket, if `args` name one, until the result is dropped.
pub(super) fn open(
    server: &Server,
    args: &ServeArgs,
    device: Option<&Device>,
) -> anyhow::Result<Option<OpenSocket>> {
    let Some(path) = &args.publish_socket else { return Ok(None) };
    let socket = PublishSocket::open(path, &args.publish_uid).context("cannot open the publish socket")?;
    // Unlike topics from files, topics of the socket have several versions even without `--watch`.
    let options = TopicOptions { expire_after: args.expire_after, ..args.server.topic_options() };
    let as_json = args.json;
    Ok(Some(server.publish_from(socket, options, device.cloned(), move |published| {
        report(&published, as_json);
    })))
}

fn report(published: &Published, as_json: bool) {
    let Published { id, tensors, payload_bytes, path, reason, peer } = published;
    let (count, bytes) = (units::count(*tensors, "tensor"), units::bytes(*payload_bytes));
    crate::log::message!("{id}: {count}, {bytes}, from {peer} through {path} ({reason:?})");
    if as_json {
        let mut line = version_object(id, *tensors, *payload_bytes);
        line["event"] = "published".into();
        (line["path"], line["reason"], line["from"]) =
            (path.name().into(), reason.as_str().into(), peer.as_str().into());
        print_object(line);
    }
}
