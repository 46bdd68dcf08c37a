//! `tensor-relay list`: what a server offers.

use crate::{
    args::ListArgs,
    subscribe::{connect, print_line},
    ticket, units,
};
use serde_json::json;
use std::process::ExitCode;
use tensor_relay_client::{Config, TopicEntry};

pub(crate) async fn run(args: ListArgs) -> anyhow::Result<ExitCode> {
    let ticket = ticket::read_any(&args.ticket.ticket)?;
    let client = connect(&ticket, args.ticket.connect_timeout, Config::default()).await?;
    let topics = client.list().await?;
    client.close().await;
    match args.json {
        true => print_line(&json!({ "topics": topics.iter().map(as_json).collect::<Vec<_>>() }).to_string()),
        false if topics.is_empty() => eprintln!("the server offers no topic yet"),
        false => print_table(&topics),
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(entry: &TopicEntry) -> serde_json::Value {
    json!({
        "topic": entry.id.topic.as_str(),
        "epoch": entry.id.epoch.to_string(),
        "version": entry.id.version.0,
        "tensors": entry.tensors,
        "payload_bytes": entry.payload_bytes,
        "subscribers": entry.subscribers,
    })
}

fn print_table(topics: &[TopicEntry]) {
    let width = topics
        .iter()
        .map(|entry| entry.id.topic.as_str().len())
        .max()
        .unwrap_or(0)
        .max(5);
    print_line(&format!(
        "{:width$}  {:>7}  {:>7}  {:>10}  {:>11}",
        "TOPIC", "VERSION", "TENSORS", "SIZE", "SUBSCRIBERS"
    ));
    for TopicEntry { id, tensors, payload_bytes, subscribers, .. } in topics {
        let (topic, version, size) = (id.topic.as_str(), id.version.0, units::bytes(*payload_bytes));
        print_line(&format!("{topic:width$}  {version:>7}  {tensors:>7}  {size:>10}  {subscribers:>11}"));
    }
}
