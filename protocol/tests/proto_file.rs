//! `tensor_relay.proto`, `sidecar.proto` and the Rust messages define the same fields.
//!
//! Method: compile the files with a protobuf compiler, decode messages that Rust encoded with the compiled description,
//! and assert that the description knows every field, that the samples use every field of the description, and that
//! encoding again results in the same bytes.

#![expect(clippy::unwrap_used, reason = "a test")]

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, Value};
use std::collections::BTreeSet;
use tensor_relay_protocol::*;

#[test]
fn proto_file() {
    let root = env!("CARGO_MANIFEST_DIR");
    let files = protox::compile(["tensor_relay.proto", "sidecar.proto"], [root]).unwrap();
    let pool = DescriptorPool::from_file_descriptor_set(files).unwrap();
    let mut used = BTreeSet::new();
    for hex in include_str!("../vectors/client-messages.hex").lines() {
        check(&pool, "tensor_relay.v1.FromClient", &unhex(hex)[4..], &mut used);
    }
    for hex in include_str!("../vectors/server-messages.hex").lines() {
        check(&pool, "tensor_relay.v1.FromServer", &unhex(hex)[4..], &mut used);
    }
    check(&pool, "tensor_relay.v1.Manifest", &manifest(), &mut used);
    for hex in include_str!("../vectors/layout-2-manifest.hex").lines() {
        check(&pool, "tensor_relay.v1.Manifest", &unhex(hex), &mut used);
    }
    for hex in include_str!("../vectors/sidecar-producer-messages.hex").lines() {
        check(&pool, "tensor_relay.sidecar.v1.FromProducer", &unhex(hex)[4..], &mut used);
    }
    for hex in include_str!("../vectors/sidecar-server-messages.hex").lines() {
        check(&pool, "tensor_relay.sidecar.v1.ToProducer", &unhex(hex)[4..], &mut used);
    }
    let described: BTreeSet<String> = pool.all_messages().flat_map(|m| field_names(&m)).collect();
    assert_eq!(used, described, "the samples must use exactly the fields that the files describe");
}

fn check(pool: &DescriptorPool, message: &str, bytes: &[u8], used: &mut BTreeSet<String>) {
    let descriptor = pool.get_message_by_name(message).unwrap();
    let decoded = DynamicMessage::decode(descriptor, bytes).unwrap();
    collect_fields(&decoded, used);
    let encoded = prost::Message::encode_to_vec(&decoded);
    assert_eq!(encoded, bytes, "{message} changes when another implementation decodes and encodes it");
}

fn collect_fields(message: &DynamicMessage, used: &mut BTreeSet<String>) {
    assert_eq!(message.unknown_fields().count(), 0, "{message:?} has fields that the file does not describe");
    for (field, value) in message.fields() {
        used.insert(field.full_name().to_owned());
        match value {
            Value::Message(inner) => collect_fields(inner, used),
            Value::List(items) => {
                items.iter().filter_map(Value::as_message).for_each(|m| collect_fields(m, used))
            }
            _ => {}
        }
    }
}

fn field_names(message: &MessageDescriptor) -> Vec<String> {
    message.fields().map(|f| f.full_name().to_owned()).collect()
}

/// A manifest in which every field is set.
fn manifest() -> Vec<u8> {
    let shape = Shape::new(&[2, 3]).unwrap();
    let spec = |name| TensorSpec::new(TensorName::new(name).unwrap(), Dtype::F32, shape.clone());
    let shard = Shard::new(&shape, Shape::new(&[4, 3]).unwrap(), &[2, 0]).unwrap();
    let specs = vec![spec("a"), TensorSpec { shard: Some(shard), ..spec("b") }];
    let metadata = vec![("k".into(), "v".into())];
    Manifest::layout(specs, metadata, 4096, &Limits::default())
        .unwrap()
        .encoded()
        .to_vec()
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
        .collect()
}
