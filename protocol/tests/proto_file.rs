//! `tensor_relay.proto`, `sidecar.proto` and the Rust messages say the same.
//!
//! Method: compile the files with a protobuf compiler, decode what Rust encoded with the compiled description, and demand
//! that no field is unknown, none of the description is unused over all samples, and the bytes come back equal.

#![expect(clippy::unwrap_used, reason = "a test")]

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, Value};
use std::collections::BTreeSet;
use tensor_relay_protocol::*;

#[test]
fn proto_file() {
    let root = env!("CARGO_MANIFEST_DIR");
    let files = protox::compile(["tensor_relay.proto", "sidecar.proto"], [root]).unwrap();
    let pool = DescriptorPool::from_file_descriptor_set(files).unwrap();
    let mut seen = BTreeSet::new();
    for hex in include_str!("../vectors/client-messages.hex").lines() {
        check(&pool, "tensor_relay.v1.FromClient", &unhex(hex)[4..], &mut seen);
    }
    for hex in include_str!("../vectors/server-messages.hex").lines() {
        check(&pool, "tensor_relay.v1.FromServer", &unhex(hex)[4..], &mut seen);
    }
    check(&pool, "tensor_relay.v1.Manifest", &manifest(), &mut seen);
    for hex in include_str!("../vectors/sidecar-producer-messages.hex").lines() {
        check(&pool, "tensor_relay.sidecar.v1.FromProducer", &unhex(hex)[4..], &mut seen);
    }
    for hex in include_str!("../vectors/sidecar-server-messages.hex").lines() {
        check(&pool, "tensor_relay.sidecar.v1.ToProducer", &unhex(hex)[4..], &mut seen);
    }
    let described: BTreeSet<String> = pool.all_messages().flat_map(|m| field_names(&m)).collect();
    assert_eq!(
        seen, described,
        "fields that a file describes and no sample of the Rust side has, or the reverse"
    );
}

fn check(pool: &DescriptorPool, message: &str, bytes: &[u8], seen: &mut BTreeSet<String>) {
    let descriptor = pool.get_message_by_name(message).unwrap();
    let decoded = DynamicMessage::decode(descriptor, bytes).unwrap();
    note_fields(&decoded, seen);
    let again = prost::Message::encode_to_vec(&decoded);
    assert_eq!(again, bytes, "{message} changes when it is read and written by another implementation");
}

fn note_fields(message: &DynamicMessage, seen: &mut BTreeSet<String>) {
    assert_eq!(message.unknown_fields().count(), 0, "{message:?} has fields that the file does not describe");
    for (field, value) in message.fields() {
        seen.insert(field.full_name().to_owned());
        match value {
            Value::Message(inner) => note_fields(inner, seen),
            Value::List(items) => {
                items.iter().filter_map(Value::as_message).for_each(|m| note_fields(m, seen))
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
