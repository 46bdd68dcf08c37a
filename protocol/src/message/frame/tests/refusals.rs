//! What a decoder refuses, or ignores.

use super::super::super::*;
use crate::MessageError;
use prost::Message;

#[test]
fn invalid_messages_are_refused() {
    let hostile = wire::FromClient {
        kind: Some(wire::ClientKind::Subscribe(wire::Subscribe {
            topic: "../etc/passwd".into(),
            ..wire::Subscribe::default()
        })),
    };
    assert!(matches!(ClientMessage::decode(&hostile.encode_to_vec()), Err(MessageError::Name(_))));
    assert_eq!(ClientMessage::decode(&[]), Err(MessageError::MissingField("kind")));
    for grant in [vec![], vec![1; 31], vec![1; 33]] {
        let join = wire::Join { lane_grant: grant.clone(), instance: vec![2; 16], ..wire::Join::default() };
        let wrong_length =
            Err(MessageError::WrongLength { field: "lane_grant", expected: 32, found: grant.len() });
        assert_eq!(from_client(wire::ClientKind::Join(join)), wrong_length);
        let welcome = wire::Welcome { lane_grant: Some(grant), ..bare_welcome() };
        assert_eq!(from_server(wire::ServerKind::Welcome(welcome)).map(|_| ()), wrong_length.map(|_| ()));
    }
    let short = wire::FromServer { kind: Some(wire::ServerKind::Complete(wire::Complete::default())) };
    assert!(matches!(ServerMessage::decode(&short.encode_to_vec()), Err(MessageError::WrongLength { .. })));
}

fn bare_welcome() -> wire::Welcome {
    wire::Welcome { instance: vec![2; 16], ..wire::Welcome::default() }
}

fn from_client(kind: wire::ClientKind) -> Result<ClientMessage, MessageError> {
    ClientMessage::decode(&wire::FromClient { kind: Some(kind) }.encode_to_vec())
}

fn from_server(kind: wire::ServerKind) -> Result<ServerMessage, MessageError> {
    ServerMessage::decode(&wire::FromServer { kind: Some(kind) }.encode_to_vec())
}

/// PROTOCOL.md §3.3: `have`, `base` and `partial` need a digest of 32 bytes.
#[test]
fn held_versions_need_a_digest() {
    let subscribe = || wire::Subscribe { topic: "t".into(), mode: 1, ..wire::Subscribe::default() };
    for digest in [vec![], vec![1; 31], vec![1; 33]] {
        let have = || Some(wire::Have { epoch: 1, version: 1, digest: digest.clone() });
        let partial = wire::Partial { epoch: 1, version: 1, chunks: vec![], digest: digest.clone() };
        let expected = MessageError::WrongLength { field: "digest", expected: 32, found: digest.len() };
        for subscribe in [
            wire::Subscribe { have: have(), ..subscribe() },
            wire::Subscribe { base: have(), ..subscribe() },
            wire::Subscribe { partial: Some(partial), ..subscribe() },
        ] {
            assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected.clone()));
        }
    }
}

/// PROTOCOL.md §3.3: a consumer is named by 16 bytes, and nobody by none.
#[test]
fn a_consumer_has_sixteen_bytes() {
    for found in [1, 15, 17] {
        let subscribe = wire::Subscribe {
            topic: "t".into(),
            mode: 1,
            consumer: Some(vec![7; found]),
            ..wire::Subscribe::default()
        };
        let expected = MessageError::WrongLength { field: "consumer", expected: 16, found };
        assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected));
    }
}

#[test]
fn long_lists_and_invalid_addresses_are_refused() {
    let too_many = |what, found, max| Err::<(), _>(MessageError::TooMany { what, found, max });
    let address = |text: String| wire::LaneAddress { transport: 1, address: text };
    let lanes = |lane_addresses| {
        from_server(wire::ServerKind::Welcome(wire::Welcome { lane_addresses, ..bare_welcome() })).map(|_| ())
    };
    assert_eq!(lanes(vec![address("h:1".into()); ADDRESSES_MAX]), Ok(()));
    assert_eq!(lanes(vec![address("h:1".into()); ADDRESSES_MAX + 1]), too_many("lane_addresses", 17, 16));
    assert_eq!(lanes(vec![address(format!("{}:65535", "h".repeat(255)))]), Ok(()));
    for wrong in
        ["h".into(), "h:0".into(), "h:65536".into(), "[::1:1".into(), format!("{}:65535", "h".repeat(256))]
    {
        assert!(matches!(lanes(vec![address(wrong)]), Err(MessageError::Malformed(_))));
    }

    let hashes = |bytes| {
        from_server(wire::ServerKind::Hashes(wire::Hashes { hashes: vec![0; bytes], ..Default::default() }))
            .map(|_| ())
    };
    assert_eq!(hashes(HASHES_MAX * 16), Ok(()));
    assert_eq!(hashes(HASHES_MAX * 16 + 1), too_many("hashes", HASHES_MAX + 1, HASHES_MAX));
    assert!(matches!(hashes(17), Err(MessageError::WrongLength { .. })));

    let drain = |alternatives| from_server(wire::ServerKind::Drain(wire::Drain { alternatives })).map(|_| ());
    assert_eq!(drain(vec!["h:1".into(); 17]), too_many("alternatives", 17, 16));
    assert!(
        matches!(drain(vec!["".into()]), Err(MessageError::Malformed(_))),
        "an alternative needs an address"
    );

    let probe = |bytes| from_client(wire::ClientKind::Probe(wire::Probe { bytes, ..Default::default() }));
    assert!(probe(ProbeBytes::MAX).is_ok() && probe(ProbeBytes::MAX + 1).is_err());
}

/// PROTOCOL.md §3.15: peers are named by addresses, not by names, and a message is bounded.
#[test]
fn invalid_messages_about_peers_are_refused() {
    let address = |text: &str| wire::LaneAddress { transport: 1, address: text.into() };
    let share_at = |addresses, key, site| {
        from_client(wire::ClientKind::Share(wire::Share { addresses, key, site })).map(|_| ())
    };
    let share = |addresses, key| share_at(addresses, key, String::new());
    let key = || Some(vec![1; 32]);
    assert_eq!(share(vec![address("10.0.0.5:4848"); PEER_ADDRESSES_MAX], key()), Ok(()));
    assert!(share(vec![address("10.0.0.5:4848"); PEER_ADDRESSES_MAX + 1], key()).is_err());
    for wrong in ["localhost:4848", "10.0.0.5", "10.0.0.5:0", "[fe80::1%1]:4848", ""] {
        assert!(share(vec![address(wrong)], key()).is_err(), "{wrong}");
    }
    assert_eq!(share(vec![], None), Ok(()));
    assert_eq!(share(vec![address("10.0.0.5:4848")], None), Err(MessageError::MissingField("key")));
    assert!(share(vec![], Some(vec![1; 31])).is_err());
    assert_eq!(share_at(vec![], key(), "x".repeat(Site::MAX_BYTES)), Ok(()));
    for wrong in [&"x".repeat(Site::MAX_BYTES + 1), "two words", "a\u{1b}[2J", "ü"] {
        assert!(share_at(vec![], key(), wrong.into()).is_err(), "{wrong:?}");
    }

    let source = wire::Source {
        addresses: vec![address("10.0.0.5:4848")],
        key: vec![1; 32],
        grant: vec![2; 32],
        chunks: vec![],
        is_near: true,
    };
    let sources = |sources| {
        let sources = wire::Sources { sources, ..wire::Sources::default() };
        from_server(wire::ServerKind::Sources(sources))
    };
    assert!(sources(vec![source.clone(); SOURCES_MAX]).is_ok());
    assert!(sources(vec![source.clone(); SOURCES_MAX + 1]).is_err());
    let range = |start| wire::ChunkRange { start, end: start + 1 };
    for wrong in [
        wire::Source { key: vec![1; 31], ..source.clone() },
        wire::Source { grant: vec![2; 33], ..source.clone() },
        wire::Source { addresses: vec![], ..source.clone() },
        wire::Source { chunks: (0..17).map(|i| range(2 * i)).collect(), ..source.clone() },
    ] {
        assert!(sources(vec![wrong]).is_err());
    }
    let unknown = wire::LaneAddress { transport: 3, address: "10.0.0.5:4848".into() };
    let ServerMessage::Sources { sources: known, .. } =
        sources(vec![wire::Source { addresses: vec![unknown], ..source.clone() }, source]).unwrap()
    else {
        panic!("not sources")
    };
    assert_eq!(known.len(), 1, "a source without a known transport is ignored");

    let held = |added, withdrawn| {
        let held = wire::Held { added, withdrawn, ..wire::Held::default() };
        from_client(wire::ClientKind::Held(held))
    };
    assert!(held(vec![range(1)], vec![range(3)]).is_ok());
    assert!(held(vec![range(1)], vec![range(1)]).is_err());
}

/// PROTOCOL.md §3.15 (11); §3.3 (20).
#[test]
fn invalid_encodings_and_grants_are_refused() {
    let encodings = |entries: Vec<u8>| {
        from_server(wire::ServerKind::Encodings(wire::Encodings { entries, ..Default::default() }))
    };
    let count = |entries| match encodings(entries) {
        Ok(ServerMessage::Encodings { entries, .. }) => entries.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!(count(vec![0; 48 * ENCODINGS_MAX]), ENCODINGS_MAX);
    for wrong in [vec![0; 48 * (ENCODINGS_MAX + 1)], vec![0; 47], vec![0; 49]] {
        assert!(encodings(wrong).is_err());
    }
    for (at, expected) in [(4, Some(0)), (5, None), (7, None), (8, Some(1)), (16, Some(1))] {
        let mut entry = vec![0; 48];
        entry[at] = 255;
        assert_eq!(encodings(entry.clone()).ok().map(|_| count(entry)), expected, "byte {at}");
    }
    for length in [0, 31, 33] {
        let subscribe = wire::Subscribe {
            topic: "t".into(),
            mode: 1,
            grant: Some(vec![1; length]),
            ..wire::Subscribe::default()
        };
        let expected = MessageError::WrongLength { field: "grant", expected: 32, found: length };
        assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected));
    }
}

/// PROTOCOL.md §5.5.
#[test]
fn invalid_boxes_are_refused() {
    let slice = |dimension, start, length, part, parts| wire::Slice { dimension, start, length, part, parts };
    let boxes = |boxes| {
        let subscribe = wire::Subscribe { topic: "t".into(), mode: 1, boxes, ..wire::Subscribe::default() };
        from_client(wire::ClientKind::Subscribe(subscribe)).map(|_| ())
    };
    let sliced = |slices| vec![wire::TensorBox { tensors: "a".into(), slices }];
    assert_eq!(boxes(sliced(vec![slice(0, 5, 0, 0, 0), slice(15, 0, 0, 7, 8)])), Ok(()));
    for wrong in [slice(16, 0, 1, 0, 0), slice(0, 0, 0, 8, 8), slice(0, 1, 0, 0, 8), slice(0, 0, 1, 0, 8)] {
        assert!(boxes(sliced(vec![wrong.clone()])).is_err(), "{wrong:?}");
    }
    let twice = slice(1, 0, 1, 0, 0);
    assert!(boxes(sliced(vec![twice.clone(), twice])).is_err(), "a dimension is cut once");
    let many = |count, name: &str| vec![wire::TensorBox { tensors: name.into(), slices: vec![] }; count];
    assert_eq!(boxes(many(BOXES_MAX, "a")), Ok(()));
    assert!(boxes(many(BOXES_MAX + 1, "a")).is_err());
    assert!(boxes(many(BOXES_MAX, &"a".repeat(33))).is_err(), "their globs are too long together");
}

/// A later build may name transports that this build does not know.
#[test]
fn unknown_transports_are_ignored() {
    let tcp = wire::LaneAddress { transport: 2, address: String::new() };
    let lane_addresses = vec![wire::LaneAddress { transport: 3, address: "h:1".into() }, tcp];
    let welcome = wire::Welcome { lane_addresses, ..bare_welcome() };
    let Ok(ServerMessage::Welcome(welcome)) = from_server(wire::ServerKind::Welcome(welcome)) else {
        panic!("not a welcome")
    };
    assert_eq!(welcome.lane_addresses, [LaneAddress { transport: Transport::Tcp, address: None }]);
}
