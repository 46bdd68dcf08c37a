//! How a version begins: its announcement, its manifest, and memory for it.

use super::{Action, Assembly, Incoming, Phase, Released, Requests, Subscriber, VersionFault, key};
use crate::{Announce, ClientMessage, Manifest, ProtocolViolation, Version, VersionId};
use std::{sync::Arc, time::Instant};

impl Subscriber {
    /// Handles an `Announce`. `received_bytes` is the number of bytes received for the subscription so far.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the previous version has not ended, the topic is another one, the version is not
    /// allowed now, or a resumed version has another manifest.
    pub fn handle_announce(
        &mut self,
        announce: Announce,
        now: Instant,
        received_bytes: u64,
    ) -> Result<(), ProtocolViolation> {
        if announce.subscription != self.options.subscription {
            self.handle_source_announce(&announce);
            return Ok(());
        }
        if self
            .sources
            .ended_apart
            .is_some_and(|(version, _)| version == key(&announce.id))
        {
            self.answer_ended_apart(announce.afresh);
            return Ok(());
        }
        if self.is_behind(&announce.id) {
            let VersionId { epoch, version, .. } = announce.id;
            self.refuse_version(epoch, version);
            return Ok(());
        }
        if !matches!(self.phase, Phase::Idle | Phase::Detached(_)) && !self.is_origin_lost() {
            return Err(ProtocolViolation::OutOfTurn {
                found: "Announce",
                expected: "the end of the previous version",
            });
        }
        if announce.id.topic != self.options.topic {
            return Err(ProtocolViolation::OutOfTurn {
                found: "another topic",
                expected: "the subscribed topic",
            });
        }
        let resumable = match &self.phase {
            Phase::Detached(incoming) | Phase::Running(incoming) => Some(incoming.id()),
            _ => None,
        };
        self.history.check_announced(&announce.id, resumable, announce.afresh)?;
        self.history.handle_announced(&announce.id, announce.afresh);
        if let Some(place) = announce.lost_place {
            self.history.handle_lost_place(place);
        }
        self.stall.restart(now, received_bytes);
        let is_shared = announce.shared;
        let begun = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Detached(incoming) if *incoming.id() == announce.id && !announce.afresh => {
                self.resume(*incoming, announce)
            }
            Phase::Running(incoming) if *incoming.id() == announce.id && !announce.afresh => {
                self.handle_origin_returned(incoming, announce)
            }
            Phase::Detached(incoming) | Phase::Running(incoming) => {
                if incoming.is_origin_lost {
                    self.drop_sources();
                    self.requests = Requests::default();
                    self.reset_arrivals();
                    self.grant_allowance();
                }
                let id = incoming.id().clone();
                self.actions.push_back(Action::Release { id, reason: Released::Replaced });
                self.await_manifest(announce);
                Ok(())
            }
            _ => {
                self.await_manifest(announce);
                Ok(())
            }
        };
        if is_shared && self.requests.is_only_pushed() {
            self.requests.share(now);
        }
        begun
    }

    /// Continues a version that was partly received over earlier connections.
    fn resume(&mut self, incoming: Incoming, announce: Announce) -> Result<(), ProtocolViolation> {
        if incoming.announce.manifest != announce.manifest {
            return Err(ProtocolViolation::WrongManifest);
        }
        self.place(Incoming { announce, ..incoming }, true);
        Ok(())
    }

    fn await_manifest(&mut self, announce: Announce) {
        self.phase = Phase::Announced { announce, complete: None };
        self.begin_if_possible();
    }

    /// Requests memory once both the announcement and its manifest have been received.
    fn begin_if_possible(&mut self) {
        let Phase::Announced { announce, complete } = &self.phase else { return };
        let latest = self.selection.as_ref();
        let announced = latest.filter(|selection| selection.manifest().digest() == announce.manifest);
        let Some(selection) = announced else {
            return;
        };
        if let Some(misfit) = self.misfit().cloned() {
            return self.actions.push_back(Action::Fail(VersionFault::Box(misfit)));
        }
        let mut assembly = Assembly::new(Arc::clone(selection));
        if let Some(digest) = complete {
            assembly.handle_complete(*digest);
        }
        let announce = announce.clone();
        self.place(Incoming { announce, assembly, resumed: 0, is_origin_lost: false }, false);
    }

    fn place(&mut self, incoming: Incoming, resumes: bool) {
        self.actions.push_back(Action::Place {
            announce: incoming.announce.clone(),
            selection: Arc::clone(incoming.assembly.selection()),
            resumes,
        });
        self.phase = Phase::Placing(Box::new(incoming));
    }

    /// Handles the allocation of memory for the current version, whose chunks may be encoded against `base`. Begins to
    /// receive the chunks that arrived early.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when an early chunk breaks a rule, or an encoding was named of a chunk that does not exist.
    pub fn handle_placed(&mut self, base: Option<Version>) -> Result<(), ProtocolViolation> {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Placing(mut incoming) => {
                incoming.assembly.set_base(base);
                Phase::Running(incoming)
            }
            other => other,
        };
        self.grant_withheld_credit();
        let mut is_shared = false;
        if let Phase::Running(incoming) = &self.phase {
            let (origin, choice) = (self.options.subscription, (self.codecs, self.seed));
            is_shared = self.requests.begin_shared(origin, &incoming.assembly, choice)?;
        }
        for early in self.arrivals.take_early() {
            if let Some(shared) = self.requests.shared_mut() {
                shared.handle_origin_header(early.header.chunk);
                self.arrivals.note_pushed(early.stream);
            }
            self.begin_chunk(early)?;
        }
        self.seek_sources();
        if is_shared {
            self.name_peers();
        }
        self.finish_if_complete();
        Ok(())
    }

    /// Handles that the bytes of the current version are in place, from the memory that its server lent.
    pub fn handle_lent(&mut self) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Placing(mut incoming) | Phase::Running(mut incoming) => {
                if let Some(digest) = incoming.announce.lending.as_ref().and_then(|lending| lending.digest())
                {
                    incoming.assembly.handle_lent(digest);
                }
                Phase::Running(incoming)
            }
            other => other,
        };
        self.grant_withheld_credit();
        self.finish_if_complete();
    }

    /// Declines the memory that the server lent for the current version: it sends chunks instead.
    pub fn decline_memory(&mut self) {
        let (Phase::Placing(incoming) | Phase::Running(incoming)) = &mut self.phase else { return };
        if incoming.announce.lending.take().is_some_and(|lending| lending.is_memory()) {
            let (subscription, (epoch, version)) = (self.options.subscription, key(incoming.id()));
            self.send(ClientMessage::Decline { subscription, epoch, version });
            self.seek_sources();
        }
    }

    /// Whether the bytes of the current version come from memory that its server lent.
    pub fn is_lent(&self) -> bool {
        let announce = match &self.phase {
            Phase::Announced { announce, .. } => announce,
            Phase::Placing(incoming) | Phase::Running(incoming) => &incoming.announce,
            Phase::Idle | Phase::Detached(_) => return false,
        };
        announce.lending.as_ref().is_some_and(|lending| lending.is_memory())
    }

    /// Handles the header of a manifest stream.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when another manifest is still arriving, unless a version that was given up excuses it.
    pub fn handle_manifest_header(&mut self) -> Result<(), ProtocolViolation> {
        let is_second = std::mem::replace(&mut self.manifests.arriving, true);
        match is_second && !self.manifests.excuse_stale() {
            true => Err(ProtocolViolation::TwoManifests(self.options.subscription)),
            false => Ok(()),
        }
    }

    /// Handles the early end of a manifest stream, whose version was given up.
    pub fn handle_manifest_lost(&mut self) {
        self.manifests.arriving = false;
    }

    /// Handles a manifest, which may arrive before its announcement. The manifest of the current version is ignored if
    /// it arrives again.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when it is not the announced manifest, or a version with another manifest is already being
    /// received, unless a version that was given up excuses it.
    pub fn handle_manifest(&mut self, manifest: Manifest) -> Result<(), ProtocolViolation> {
        self.manifests.arriving = false;
        let checked = match &self.phase {
            Phase::Placing(incoming) | Phase::Running(incoming)
                if **incoming.assembly.manifest() == manifest =>
            {
                return Ok(());
            }
            Phase::Placing(_) | Phase::Running(_) => {
                Err(ProtocolViolation::OutOfTurn { found: "a manifest", expected: "chunks" })
            }
            Phase::Announced { announce, .. } if announce.manifest != manifest.digest() => {
                Err(ProtocolViolation::WrongManifest)
            }
            Phase::Idle | Phase::Detached(_) | Phase::Announced { .. } => Ok(()),
        };
        match checked {
            Err(_) if self.manifests.excuse_stale() => return Ok(()),
            checked => checked?,
        }
        self.set_manifest(Arc::new(manifest));
        self.begin_if_possible();
        Ok(())
    }
}
