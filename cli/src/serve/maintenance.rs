//! Keeps the served files current: polls the watched ones and publishes their changes, and ends topics whose files are
//! lost.

use super::{
    offer::{Offer, WatchedFiles},
    report_published,
};
use anyhow::anyhow;
use std::{convert::Infallible, time::Duration};
use tokio::task::JoinSet;

/// The maximum number of tasks that poll watched files, each on one thread. A file system that hangs delays only the
/// files that are polled by the same task.
const POLLERS_MAX: usize = 16;

/// Maintains `offers` until the returned set is dropped: publishes new content of watched files, and ends topics whose
/// unwatched files are lost.
pub(super) fn maintain(offers: Vec<Offer>, interval: Duration, as_json: bool) -> JoinSet<Offer> {
    let mut maintaining = JoinSet::new();
    let (watched, unwatched): (Vec<_>, Vec<_>) = offers.into_iter().partition(Offer::is_watched);
    for offer in unwatched {
        maintaining.spawn(async move {
            offer.end_when_lost().await;
            offer
        });
    }
    let mut groups: [Vec<Offer>; POLLERS_MAX] = Default::default();
    watched
        .into_iter()
        .enumerate()
        .for_each(|(number, offer)| groups[number % POLLERS_MAX].push(offer));
    for group in groups.into_iter().filter(|group| !group.is_empty()) {
        maintaining.spawn(async move { match publish_changes(group, interval, as_json).await {} });
    }
    maintaining
}

/// Waits until every topic has ended because its files are lost. Returns the error with which the server ends then.
pub(super) async fn all_lost(maintaining: &mut JoinSet<Offer>) -> anyhow::Error {
    // Ended topics are kept until the last one ends, so that their new subscribers receive their errors.
    let mut lost = vec![];
    while let Some(offer) = maintaining.join_next().await {
        lost.push(offer);
    }
    anyhow!(
        "nothing is on offer any more, because the served files were changed in place (see the errors above): start \
         the server again"
    )
}

/// Polls the files of `offers` every `interval`, together, and publishes those that changed, each in a task of its own,
/// because a publish may wait for readers.
async fn publish_changes(mut offers: Vec<Offer>, interval: Duration, as_json: bool) -> Infallible {
    let mut publishing = JoinSet::new();
    loop {
        tokio::time::sleep(interval).await;
        while let Some(published) = publishing.try_join_next() {
            offers.extend(published);
        }
        let files: Vec<_> = offers.iter().filter_map(Offer::files).collect();
        let polling = move || files.iter().map(WatchedFiles::poll).collect::<Vec<_>>();
        let Ok(polled) = tokio::task::spawn_blocking(polling).await else { continue };
        for (mut offer, polled) in std::mem::take(&mut offers).into_iter().zip(polled) {
            if !offer.handle_polled(polled) {
                offers.push(offer);
                continue;
            }
            publishing.spawn(async move {
                if let Some(published) = offer.publish_files(interval).await {
                    report_published(&published, as_json);
                }
                offer
            });
        }
    }
}
