//! Versions that are received into the user's own device memory.

use super::*;

/// Goal: versions are received directly into the user's own device memory, exactly, in both modes, without other
/// memory.
/// Method: every kind of tensor, the same buffers ten times, and a budget of zero.
#[test]
fn versions_arrive_in_the_users_device_memory() {
    for every in [false, true] {
        simulate(12, async |sim| {
            let specs = all_kinds();
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = controlled(u64::MAX, 16);
            let mut buffers = buffers_on(&device, &specs);
            let before = engine.in_use_bytes();
            let request =
                if every { Request::every(topic("t")).window(1) } else { Request::latest(topic("t")) };
            let config = Config { memory_bytes: 0, ..client_config() };
            let (_client, mut subscription) = subscribe(&sim, config, request).await;
            for version in 1..=10 {
                let publishing = publish(&server, &mut publisher, version, &specs);
                let (filled, ()) = tokio::join!(subscription.next_into_device(buffers), async {
                    sleep(Duration::from_millis(10)).await;
                    publishing.await;
                });
                let filled = filled.unwrap();
                assert_eq!((filled.version().id().version, filled.was_copied()), (Version(version), false));
                assert!(have_content(filled.buffers(), version).await, "version {version}");
                buffers = filled.into_buffers();
                assert_eq!(engine.in_use_bytes(), before);
            }
        });
    }
}

/// Goal: boxes are received into the user's own device memory, in place, or by a copy if they came before the buffers; no
/// other byte of it is written.
/// Method: rows, columns, a range of both, and a whole tensor, each in a buffer of its own; compare with the same boxes on
/// the host.
#[test]
fn boxes_arrive_in_the_users_device_memory() {
    for came_before in [false, true] {
        simulate(16, async |sim| {
            let specs = [
                tensors::shaped("rows", Dtype::U8, &[512, 1000]),
                tensors::shaped("columns", Dtype::Bf16, &[600, 512]),
                tensors::shaped("both", Dtype::F32, &[20, 30, 40]),
                noise("whole", 1000),
            ];
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let device = device(u64::MAX);
            let mut buffers = Buffers::new();
            for (spec, bounds) in specs.iter().zip([
                Bounds::new([100..300, 0..1000]),
                Bounds::new([0..600, 17..40]),
                Bounds::new([3..9, 5..6, 7..30]),
                Bounds::new(std::iter::once(0..1000)),
            ]) {
                let bytes = bounds.shape().unwrap().byte_len(spec.dtype).unwrap();
                buffers.insert(spec.name.clone(), device.allocate(bytes as usize).unwrap());
                buffers.expect_box(spec.name.clone(), spec.dtype, spec.shape.clone(), bounds);
            }
            let request = Request::latest(topic("t")).boxes(buffers.boxes());
            let (client, mut subscription) = subscribe(&sim, client_config(), request).await;
            for version in 1..=3 {
                if came_before {
                    publish(&server, &mut publisher, version, &specs).await;
                    sleep(Duration::from_secs(1)).await;
                }
                let (filled, ()) = tokio::join!(subscription.next_into_device(buffers), async {
                    if !came_before {
                        sleep(Duration::from_millis(10)).await;
                        publish(&server, &mut publisher, version, &specs).await;
                    }
                });
                let filled = filled.unwrap();
                assert_eq!(
                    (filled.version().id().version, filled.was_copied()),
                    (Version(version), came_before)
                );
                let request = Request::newest(topic("t")).boxes(filled.buffers().boxes());
                let expected = client.subscribe_to(request).await.unwrap().next().await.unwrap();
                tensors::check(&expected);
                for (name, buffer) in filled.buffers().iter() {
                    let expected = tensors::on_host(&expected).tensor(name.as_str()).unwrap();
                    assert_eq!(bytes_in(buffer).await, expected, "{name} of version {version}");
                }
                buffers = filled.into_buffers();
            }
        });
    }
}

/// Goal: a version that was received before its buffers were passed is copied to them, from the host or a device, to
/// the host or a device. If the buffers do not fit, the version waits for other buffers.
/// Method: all four combinations; buffers that are too small, have an unknown name, or are on two devices.
#[test]
fn a_version_waits_for_buffers_that_fit() {
    for received_on_device in [false, true] {
        simulate(13, async |sim| {
            let specs = [noise("a", BYTES), noise("b", 1_000)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), None, retaining(4)).unwrap();
            let (mine, other) = (device(u64::MAX), device(u64::MAX));
            let config = Config { device: received_on_device.then(|| mine.clone()), ..client_config() };
            let (_client, mut subscription) = subscribe(&sim, config, Request::every(topic("t"))).await;
            for version in 1..=2 {
                publish(&server, &mut publisher, version, &specs).await;
            }
            sleep(Duration::from_secs(1)).await;
            let mut two_devices = buffers_on(&mine, &specs);
            two_devices.insert(specs[1].name.clone(), other.allocate(1_000).unwrap());
            let wrong = [
                buffers_on(&mine, &[noise("a", BYTES), noise("b", 999)]),
                buffers_on(&mine, &[noise("a", BYTES), noise("c", 1_000)]),
                two_devices,
            ];
            for wrong in wrong {
                let error = subscription.next_into_device(wrong).await.unwrap_err();
                assert!(matches!(error.cause, FillCause::Buffers(_)) && !error.is_final(), "{error}");
                assert!(error.torn.is_none() && error.withheld.is_empty() && error.buffers.len() == 2);
            }
            let filled = subscription.next_into_device(buffers_on(&mine, &specs)).await.unwrap();
            assert!(filled.was_copied() && have_content(filled.buffers(), 1).await);

            let on_host: Buffers<Vec<u8>> = specs
                .iter()
                .map(|spec| (spec.name.clone(), vec![0; bytes_of(spec) as usize]))
                .collect();
            let filled = subscription.next_into(on_host).await.unwrap();
            assert!(filled.was_copied());
            for (name, buffer) in filled.buffers().iter() {
                assert_eq!(*buffer, content(name, 2, buffer.len() as u64));
            }
        });
    }
}

/// Goal: a snapshot on the host or on a device is copied to the user's device memory; if one buffer does not fit, the
/// copy is refused.
/// Method: buffers with other content, first with one of a wrong size, then all of the right size.
#[test]
fn a_snapshot_is_copied_to_device_memory() {
    for received_on_device in [false, true] {
        simulate(14, async |sim| {
            let specs = all_kinds();
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, &specs).await;
            let config = Config { device: received_on_device.then(|| device(u64::MAX)), ..client_config() };
            let (_client, mut subscription) = subscribe(&sim, config, Request::latest(topic("t"))).await;
            let snapshot = subscription.next().await.unwrap();
            // One slot is enough, even if it is shorter than a chunk.
            let own = TestEngine::new(u64::MAX).device(1, 5_000);
            let mut buffers = buffers_on(&own, &specs);
            let wrong = own.allocate(1).unwrap();
            let right = buffers.insert(specs[0].name.clone(), wrong).unwrap();
            let refused = snapshot.copy_into_device(&buffers).await.unwrap_err();
            assert!(matches!(refused, FillCause::Buffers(BufferError::WrongSize { .. })), "{refused}");
            for (name, buffer) in buffers.iter() {
                assert!(bytes_in(buffer).await.iter().all(|byte| *byte == 0), "{name} is unchanged");
            }
            buffers.insert(specs[0].name.clone(), right);
            snapshot.copy_into_device(&buffers).await.unwrap();
            assert!(have_content(&buffers, 1).await);
        });
    }
}

/// Goal: boxes of a version that was received before are copied to device memory, from the host or a device.
/// Method: the second half of a large and of a small tensor; what is received of them lies elsewhere in the version.
#[test]
fn boxes_are_copied_to_device_memory() {
    for received_on_device in [false, true] {
        simulate(14, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, &[noise("a", BYTES), noise("b", 1_000)]).await;
            let config = Config { device: received_on_device.then(|| device(u64::MAX)), ..client_config() };
            let slices = vec![Slice { dimension: 0, indices: Indices::Part { part: 1, parts: 2 } }];
            let half = TensorBox { tensors: Glob::new("*").unwrap(), slices };
            let request = Request::latest(topic("t")).boxes([half]);
            let (_client, mut subscription) = subscribe(&sim, config, request).await;
            let snapshot = subscription.next().await.unwrap();
            let buffers = buffers_on(&device(u64::MAX), &[noise("a", BYTES / 2), noise("b", 500)]);
            snapshot.copy_into_device(&buffers).await.unwrap();
            for (name, buffer) in buffers.iter() {
                let half_bytes = buffer.len_bytes();
                let whole = content(name, 1, 2 * half_bytes);
                assert_eq!(bytes_in(buffer).await, whole[half_bytes as usize..], "{name}");
            }
        });
    }
}

/// Goal: after a failure, buffers on a device are returned when no copy to them is in flight, and not before; the error
/// says that they are torn.
/// Method: cut the path during copies, and let the copies pass later.
#[test]
fn buffers_are_returned_after_their_copies() {
    simulate(15, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = controlled(u64::MAX, 16);
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        engine.behave(Behaviour::Held);
        let began = sim.elapsed();
        let (filled, ()) = tokio::join!(subscription.next_into_device(buffers_on(&device, &specs)), async {
            sleep(Duration::from_millis(100)).await;
            publish(&server, &mut publisher, 1, &specs).await;
            eventually("copies are in flight", || engine.held() == credit()).await;
            sim.cut(1);
            sleep(OUTAGE_DURATION).await;
            assert_eq!(engine.held(), credit());
            engine.release_all();
        });
        let error = filled.unwrap_err();
        assert!(sim.elapsed() - began >= OUTAGE_DURATION && sim.elapsed() - began < OUTAGE_DURATION * 2);
        assert!(
            matches!(error.cause, FillCause::Subscription(SubscriptionError::Disconnected { .. })),
            "{error}"
        );
        assert_eq!(error.torn.as_ref().map(|id| id.version), Some(Version(1)));
        assert_eq!((error.buffers.len(), error.withheld.len()), (2, 0));
    });
}

/// Goal: a call that is stopped returns its buffers on a device when no copy to them is in flight, and not before.
/// Method: stop the call during copies, and let the copies pass later.
#[test]
fn a_stopped_call_waits_for_its_copies() {
    simulate(15, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1_000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = controlled(u64::MAX, 16);
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        engine.behave(Behaviour::Held);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async { drop(stopped.await) };
        let filling = subscription.next_into_device_until(buffers_on(&device, &specs), stopped);
        let (filled, ()) = tokio::join!(filling, async {
            sleep(Duration::from_millis(100)).await;
            publish(&server, &mut publisher, 1, &specs).await;
            eventually("copies are in flight", || engine.held() == credit()).await;
            drop(stop);
            sleep(Duration::from_secs(5)).await;
            assert_eq!(engine.held(), credit());
            engine.release_all();
            engine.behave(Behaviour::AtOnce);
        });
        let error = filled.unwrap_err();
        assert!(matches!(error.cause, FillCause::Stopped), "{error}");
        assert_eq!(error.torn.as_ref().map(|id| id.version), Some(Version(1)));
        assert_eq!((engine.held(), error.buffers.len(), error.withheld.len()), (0, 2, 0));
        let filled = subscription.next_into_device(error.buffers).await.unwrap();
        assert!(have_content(filled.buffers(), 1).await);
    });
}

/// Goal: a buffer that a copy may still write to is not returned, and its memory is not free before that copy has
/// ended; other buffers are returned.
/// Method: the device hangs, or reports that it has stopped, during the copies of one tensor of two.
#[test]
fn buffers_under_a_lost_copy_are_withheld() {
    for hangs in [true, false] {
        simulate(16, async |sim| {
            let specs = [noise("a", BYTES), noise("b", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (engine, device) = controlled(u64::MAX, 16);
            let (_client, mut subscription) =
                subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
            engine.behave(Behaviour::Held);
            let (filled, ()) =
                tokio::join!(subscription.next_into_device(buffers_on(&device, &specs)), async {
                    sleep(Duration::from_millis(100)).await;
                    publish(&server, &mut publisher, 1, &specs).await;
                    eventually("copies are in flight", || engine.held() == credit()).await;
                    if !hangs {
                        engine.report_stopped();
                    }
                });
            let error = filled.unwrap_err();
            let FillCause::Subscription(SubscriptionError::Device { is_final, .. }) = &error.cause else {
                panic!("{error}")
            };
            assert_eq!(*is_final, !hangs);
            assert_eq!(error.torn.as_ref().map(|id| id.version), Some(Version(1)));
            let names = |names: &[TensorName]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!((names(&error.withheld), error.buffers.len()), (vec!["a".to_owned()], 1));
            assert!(error.buffers.get("b").is_some());
            drop(error);
            assert!(engine.in_use_bytes() >= BYTES, "copies may still write to the memory of `a`");
            engine.release_all();
            eventually("memory is free", || engine.in_use_bytes() == 0).await;
        });
    }
}

/// Goal: a call that is cancelled loses no version and leaves nothing that writes to its buffers: their memory is free,
/// and the version is received again, in other memory.
/// Method: cancel the call during the transfer; take the snapshot.
#[test]
fn a_cancelled_call_loses_no_version() {
    simulate(17, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1_000), noise("c", 3_000)];
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (engine, device) = controlled(u64::MAX, 16);
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        let progress = subscription.progress_reader();
        tokio::select! {
            filled = subscription.next_into_device(buffers_on(&device, &specs[..2])) => panic!("{filled:?}"),
            () = async {
                sleep(Duration::from_millis(100)).await;
                publish(&server, &mut publisher, 1, &specs).await;
                eventually("the transfer runs", || progress().verified_bytes > 0).await;
            } => {}
        }
        let snapshot = subscription.next().await.unwrap();
        assert_eq!(snapshot.manifest().tensors().len(), specs.len());
        assert_eq!(engine.in_use_bytes(), 0, "it is not in the buffers' memory");
        tensors::check(&snapshot);
    });
}
