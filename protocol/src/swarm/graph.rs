//! [`Graph`]: whom the origin names to whom.

use super::{MemberId, NEIGHBOURS_MAX, random::Random};
use crate::Site;
use std::collections::{BTreeMap, BTreeSet};

/// The number of rings: with two neighbours in each, a member has at most [`NEIGHBOURS_MAX`].
const RINGS: usize = NEIGHBOURS_MAX / 2;

/// The rings of all holders. On the others are those of one site each.
const WIDE_RINGS: usize = 2;

/// Up to so many holders, each is named to every member.
const ALL_MAX: usize = NEIGHBOURS_MAX + 1;

/// The holders of a version, on rings of random order (Law and Siu, "Distributed construction of random expander
/// networks"), and the members that only take. A holder's neighbours are those beside it. So the graph is connected as
/// long as one ring is, which is always: the neighbours of a member that leaves become neighbours, one that joins is put
/// between two.
/// Each changes the neighbours of at most [`NEIGHBOURS_MAX`] holders, and its random regular graphs are short: a chunk
/// passes 1,000 members in three or four steps. Most rings connect the holders of one site, the others all of them.
#[derive(Debug)]
pub(super) struct Graph {
    random: Random,
    nodes: BTreeMap<MemberId, Node>,
    /// The holders, in any order; all, and those of each site.
    holders: Vec<MemberId>,
    sites: BTreeMap<Site, Vec<MemberId>>,
    /// The members whose neighbours have changed.
    changed: BTreeSet<MemberId>,
}

#[derive(Debug)]
struct Node {
    /// The place among the holders, and the neighbours on each ring; `None` for a member that only takes.
    holder: Option<Box<Holder>>,
    neighbours: Vec<MemberId>,
    site: Site,
}

#[derive(Debug)]
struct Holder {
    place: usize,
    place_in_site: usize,
    /// The one before and the one behind, on each ring.
    beside: [(MemberId, MemberId); RINGS],
    /// The members that only take and have it as a neighbour.
    takers: BTreeSet<MemberId>,
}

impl Graph {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            nodes: BTreeMap::new(),
            holders: vec![],
            sites: BTreeMap::new(),
            changed: BTreeSet::new(),
        }
    }

    /// The holders that are named to a member.
    pub(super) fn neighbours(&self, member: MemberId) -> &[MemberId] {
        self.nodes.get(&member).map_or(&[], |node| &node.neighbours)
    }

    /// The members whose neighbours have changed since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<MemberId> {
        std::mem::take(&mut self.changed)
    }

    /// Whether two members are at one site.
    pub(super) fn are_near(&self, one: MemberId, other: MemberId) -> bool {
        let site = |member| self.nodes.get(&member).map(|node| &node.site);
        site(one) == site(other)
    }

    /// Adds a member at a site, which `serves` chunks or only takes them.
    pub(super) fn join(&mut self, member: MemberId, serves: bool, site: Site) {
        let node = Node { holder: None, neighbours: vec![], site: site.clone() };
        let before = self.nodes.insert(member, node);
        debug_assert!(before.is_none(), "a member joins once");
        if serves {
            let mut beside = [(member, member); RINGS];
            let mut affected = BTreeSet::from([member]);
            for (ring, beside) in beside.iter_mut().enumerate() {
                if let Some(before) = self.draw(&site, ring) {
                    let behind = self.beside(before, ring).1;
                    *beside = (before, behind);
                    affected.extend([before, behind]);
                    self.set_behind(before, ring, member);
                    self.set_before(behind, ring, member);
                }
            }
            let of_site = self.sites.entry(site).or_default();
            let (place, place_in_site) = (self.holders.len(), of_site.len());
            let holder = Holder { place, place_in_site, beside, takers: BTreeSet::new() };
            of_site.push(member);
            self.holders.push(member);
            self.nodes.entry(member).and_modify(|node| node.holder = Some(Box::new(holder)));
            self.refresh(affected);
        } else {
            self.refresh(BTreeSet::from([member]));
        }
    }

    /// Removes a member.
    pub(super) fn leave(&mut self, member: MemberId) {
        let Some(node) = self.nodes.remove(&member) else { return };
        self.changed.remove(&member);
        let Some(holder) = node.holder else {
            for neighbour in node.neighbours {
                self.holder_mut(neighbour).into_iter().for_each(|holder| {
                    holder.takers.remove(&member);
                });
            }
            return;
        };
        self.holders.swap_remove(holder.place);
        if let Some(moved) = self.holders.get(holder.place).copied() {
            self.holder_mut(moved).into_iter().for_each(|moved| moved.place = holder.place);
        }
        self.leave_site(&node.site, holder.place_in_site);
        let mut affected = holder.takers;
        for (ring, (before, behind)) in holder.beside.into_iter().enumerate() {
            self.set_behind(before, ring, behind);
            self.set_before(behind, ring, before);
            affected.extend([before, behind]);
        }
        affected.remove(&member);
        self.refresh(affected);
    }

    fn leave_site(&mut self, site: &Site, place: usize) {
        let Some(of_site) = self.sites.get_mut(site) else { return };
        of_site.swap_remove(place);
        let moved = of_site.get(place).copied();
        if of_site.is_empty() {
            self.sites.remove(site);
        }
        if let Some(moved) = moved.and_then(|moved| self.holder_mut(moved)) {
            moved.place_in_site = place;
        }
    }

    /// A holder that a ring may have beside a member of this site, drawn at random.
    fn draw(&mut self, site: &Site, ring: usize) -> Option<MemberId> {
        let of_ring: &[MemberId] = match ring < WIDE_RINGS {
            true => &self.holders,
            false => self.sites.get(site).map_or(&[], Vec::as_slice),
        };
        of_ring.get(self.random.below(of_ring.len())).copied()
    }

    fn holder_mut(&mut self, member: MemberId) -> Option<&mut Holder> {
        self.nodes.get_mut(&member)?.holder.as_deref_mut()
    }

    fn beside(&self, member: MemberId, ring: usize) -> (MemberId, MemberId) {
        let holder = self.nodes.get(&member).and_then(|node| node.holder.as_ref());
        holder.map_or((member, member), |holder| holder.beside[ring])
    }

    fn set_before(&mut self, member: MemberId, ring: usize, before: MemberId) {
        if let Some(holder) = self.holder_mut(member) {
            holder.beside[ring].0 = before;
        }
    }

    fn set_behind(&mut self, member: MemberId, ring: usize, behind: MemberId) {
        if let Some(holder) = self.holder_mut(member) {
            holder.beside[ring].1 = behind;
        }
    }

    /// Names neighbours anew to these members; to all, if the number of holders is about the one to which all are
    /// named.
    fn refresh(&mut self, mut affected: BTreeSet<MemberId>) {
        if self.holders.len() <= ALL_MAX + 1 {
            affected = self.nodes.keys().copied().collect();
        }
        for member in affected {
            let Some(node) = self.nodes.get(&member) else { continue };
            let neighbours = match &node.holder {
                Some(holder) if self.holders.len() > ALL_MAX => {
                    let beside = holder.beside.iter().flat_map(|(before, behind)| [*before, *behind]);
                    BTreeSet::from_iter(beside.filter(|other| *other != member))
                        .into_iter()
                        .collect()
                }
                Some(_) => {
                    let mut others = self.holders.clone();
                    others.retain(|other| *other != member);
                    others.sort_unstable();
                    others
                }
                None => self.chosen(member, node.neighbours.clone()),
            };
            if let Some(node) = self.nodes.get_mut(&member).filter(|node| node.neighbours != neighbours) {
                node.neighbours = neighbours;
                self.changed.insert(member);
            }
        }
    }

    /// The neighbours of a member that only takes: those that it has and that are there, and others at random, of its site
    /// if there are enough.
    fn chosen(&mut self, member: MemberId, mut chosen: Vec<MemberId>) -> Vec<MemberId> {
        chosen.retain(|holder| self.nodes.contains_key(holder));
        let of_site = self.nodes.get(&member).and_then(|node| self.sites.get(&node.site));
        let near_max = NEIGHBOURS_MAX - 2 * WIDE_RINGS;
        for (holders, wanted) in of_site
            .map(|near| (near, near_max))
            .into_iter()
            .chain([(&self.holders, NEIGHBOURS_MAX)])
        {
            // Those behind a random place are not the same for any two members, and are found without repetition.
            let first = self.random.below(holders.len());
            for step in 0..holders.len() {
                if chosen.len() >= wanted {
                    break;
                }
                let holder = holders[(first + step) % holders.len()];
                if !chosen.contains(&holder) {
                    chosen.push(holder);
                }
            }
        }
        for holder in &chosen {
            self.holder_mut(*holder).into_iter().for_each(|holder| {
                holder.takers.insert(member);
            });
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The site of a member, by its number.
    fn site(member: MemberId) -> Site {
        Site::new(["", "", "", "east", "west"][member.0 as usize % 5]).unwrap()
    }

    #[test]
    fn most_neighbours_are_of_the_same_site() {
        let mut graph = Graph::new(7);
        (0..100).for_each(|id| graph.join(MemberId(id), true, site(MemberId(3 + id % 2))));
        graph.join(MemberId(100), false, site(MemberId(3)));
        let mut far = 0;
        for member in (0..=100).map(MemberId) {
            let neighbours = graph.neighbours(member);
            let near = neighbours.iter().filter(|other| graph.are_near(member, **other)).count();
            assert!(near >= 8, "{member:?}: {near} of {}", neighbours.len());
            far += neighbours.len() - near;
        }
        assert!((100..=303).contains(&far), "{far}");
    }

    /// The members that a chunk of `first` comes to.
    fn reached(graph: &Graph, first: MemberId) -> BTreeSet<MemberId> {
        let (mut reached, mut next) = (BTreeSet::from([first]), vec![first]);
        while let Some(from) = next.pop() {
            // The neighbours of a holder have it as a neighbour, too.
            let new = graph.neighbours(from).iter().filter(|other| reached.insert(**other));
            next.extend(new);
        }
        reached
    }

    proptest! {
        /// For any members that join and leave: each is named at most 16 holders, and never itself; whoever is named to
        /// a holder is named it; all holders are connected; members that only take are named holders, as many as
        /// possible; and only members in `take_changed` have other neighbours than before.
        #[test]
        fn the_graph_stays_connected(
            steps in prop::collection::vec((0u64..60, any::<bool>(), prop::bool::weighted(0.7)), 0..150),
            seed: u64,
        ) {
            let (mut graph, mut members) = (Graph::new(seed), BTreeMap::new());
            for (id, is_join, serves) in steps {
                let id = MemberId(id);
                let before: BTreeMap<_, _> =
                    members.keys().map(|id| (*id, graph.neighbours(*id).to_vec())).collect();
                match is_join {
                    true if !members.contains_key(&id) => {
                        members.insert(id, serves);
                        graph.join(id, serves, site(id));
                    }
                    true => {}
                    false => {
                        members.remove(&id);
                        graph.leave(id);
                    }
                }
                let changed = graph.take_changed();
                let holders: BTreeSet<_> =
                    members.iter().filter(|(_, serves)| **serves).map(|(id, _)| *id).collect();
                for (id, serves) in &members {
                    let neighbours = graph.neighbours(*id);
                    prop_assert!(neighbours.len() <= NEIGHBOURS_MAX && !neighbours.contains(id));
                    prop_assert!(neighbours.iter().all(|other| holders.contains(other)));
                    let is_mutual = |other: &MemberId| graph.neighbours(*other).contains(id);
                    prop_assert!(!serves || neighbours.iter().all(is_mutual));
                    prop_assert!(*serves || neighbours.len() == holders.len().min(NEIGHBOURS_MAX));
                    let is_same = before.get(id).is_some_and(|before| before == neighbours);
                    prop_assert!(is_same || changed.contains(id) || neighbours.is_empty());
                }
                if let Some(first) = holders.first() {
                    prop_assert_eq!(reached(&graph, *first), holders);
                }
            }
        }
    }

    #[test]
    fn a_member_that_joins_or_leaves_changes_few_neighbours() {
        let mut graph = Graph::new(7);
        (0..200).for_each(|id| graph.join(MemberId(id), true, Site::default()));
        graph.take_changed();
        graph.join(MemberId(200), true, Site::default());
        assert!(graph.take_changed().len() <= NEIGHBOURS_MAX + 1);
        graph.leave(MemberId(100));
        assert!(graph.take_changed().len() <= NEIGHBOURS_MAX);
    }
}
