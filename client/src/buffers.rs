//! The user's own memory, by the name of the tensor that belongs there, and how it is lent.

use crate::{
    Snapshot,
    fill::{BufferError, FillCause},
    landing::Lodged,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_device::{DeviceBuffer, GiveBack, Region};
use tensor_relay_protocol::{
    Dtype, GLOBS_MAX, Glob, SELECTION_MAX_BYTES, Selection, Shape, TensorName, VersionId,
};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

/// Memory of the caller's for tensors, one buffer a tensor: a `Vec<u8>`, or a tensor of another library.
///
/// A buffer has exactly the bytes of its tensor; its dtype and shape matter only where they are [expected](Self::expect). Lent to
/// [`Subscription::next_into`](crate::Subscription::next_into), and given back with its end, whatever that is. Those of
/// a device are [`DeviceBuffer`]s, for [`next_into_device`](crate::Subscription::next_into_device).
///
/// ```
/// use tensor_relay_client::{Buffers, TensorName};
///
/// let bias = TensorName::new("model.bias").unwrap();
/// let buffers: Buffers<Vec<u8>> = [(bias, vec![0; 4096])].into_iter().collect();
/// assert_eq!(buffers.get("model.bias").unwrap().len(), 4096);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffers<B> {
    by_name: BTreeMap<TensorName, B>,
    expected: Arc<Expected>,
}

/// What a version must be, beyond the length of each tensor that has a buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    tensors: BTreeMap<TensorName, (Dtype, Shape)>,
    /// Names without a buffer of their own, and whose buffer is theirs.
    tied: BTreeMap<TensorName, TensorName>,
    names: NameMatch,
}

/// Which buffers and tensors must have each other's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NameMatch {
    /// Every buffer must have its tensor. Tensors without a buffer are not received.
    #[default]
    Buffers,
    /// Every buffer must have its tensor, and every selected tensor its buffer, or that of a tensor that shares its bytes.
    Exact,
    /// Neither: what both have is received, and other buffers stay as they are. Of the buffers that
    /// [expect](Buffers::expect) a dtype and shape, one at the least must have its tensor.
    Common,
}

impl<B> Default for Buffers<B> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new(), expected: Arc::default() }
    }
}

impl<B> FromIterator<(TensorName, B)> for Buffers<B> {
    /// Of several buffers for one tensor, the last one counts.
    fn from_iter<I: IntoIterator<Item = (TensorName, B)>>(buffers: I) -> Self {
        Self { by_name: buffers.into_iter().collect(), expected: Arc::default() }
    }
}

impl<B> IntoIterator for Buffers<B> {
    type Item = (TensorName, B);
    type IntoIter = std::collections::btree_map::IntoIter<TensorName, B>;

    fn into_iter(self) -> Self::IntoIter {
        self.by_name.into_iter()
    }
}

impl<B> Buffers<B> {
    /// No buffers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer for the tensor called `name`; gives the one back that it had.
    pub fn insert(&mut self, name: TensorName, buffer: B) -> Option<B> {
        self.by_name.insert(name, buffer)
    }

    /// Refuses a version in which the tensor called `name` is not of this dtype and shape, before anything is written. For
    /// memory that is a tensor itself, whose user would take other elements of the same length for its own.
    pub fn expect(&mut self, name: TensorName, dtype: Dtype, shape: Shape) {
        Arc::make_mut(&mut self.expected).tensors.insert(name, (dtype, shape));
    }

    /// Says that the buffer of `to` is the tensor called `name` as well, and refuses a version in which these two do not
    /// share their bytes (tied weights).
    pub fn expect_tied(&mut self, name: TensorName, to: TensorName) {
        Arc::make_mut(&mut self.expected).tied.insert(name, to);
    }

    /// Refuses a version in which names differ more than this allows. By default every buffer must have its tensor.
    pub fn match_names(&mut self, names: NameMatch) {
        Arc::make_mut(&mut self.expected).names = names;
    }

    /// Refuses a snapshot that the buffers do not fit, whose lengths `len_bytes` gives. Buffers for tensors that share their
    /// bytes are not refused: a copy can be made to each.
    ///
    /// # Errors
    /// [`BufferError`] says what does not fit.
    pub fn check(&self, snapshot: &Snapshot, len_bytes: impl Fn(&B) -> u64) -> Result<(), BufferError> {
        let asked = self.iter().map(|(name, buffer)| (name.as_str(), len_bytes(buffer)));
        self.expected.check(&snapshot.selection, asked).map(drop)
    }

    pub(crate) fn expected(&self) -> &Expected {
        &self.expected
    }

    /// The buffer of the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&B> {
        self.by_name.get(name)
    }

    /// The same, to write to.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut B> {
        self.by_name.get_mut(name)
    }

    /// Every buffer with the name of its tensor, in the order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorName, &B)> {
        self.by_name.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// What to [select](crate::Request::select) so that little travels but the tensors that have a buffer: their names,
    /// as globs. Nothing, which selects everything, where there are more names than a selection holds (64, of 8,192
    /// bytes together): write globs by hand then.
    ///
    /// A name that contains `*` or `?` selects itself, and others that it happens to match. They travel for nothing, and
    /// harm nobody.
    pub fn selection(&self) -> Vec<Glob> {
        let bytes: usize = self.by_name.keys().map(|name| name.as_str().len()).sum();
        if self.len() > GLOBS_MAX || bytes > SELECTION_MAX_BYTES {
            return vec![];
        }
        let globs: Result<_, _> = self.by_name.keys().map(|name| Glob::new(name.as_str())).collect();
        globs.unwrap_or_default()
    }
}

/// What is copied at once: less than a millisecond, so that nobody on the executor waits.
pub(crate) const COPY_BYTES: usize = 1 << 20;

impl<B: AsMut<[u8]> + Send> Buffers<B> {
    /// Copies the tensors of `snapshot` that have a buffer, all of them or none. When it is cancelled, some are copied.
    pub(crate) async fn copy_from(&mut self, snapshot: &Snapshot) -> Result<(), FillCause> {
        let slices = self.by_name.iter_mut().map(|(name, buffer)| (name.as_str(), buffer.as_mut()));
        let slices: Vec<_> = slices
            .filter(|(name, _)| self.expected.wants(&snapshot.selection, name))
            .collect();
        let asked = slices.iter().map(|(name, out)| (*name, out.len() as u64));
        let fits = self.expected.fit(&snapshot.selection, asked)?;
        let source = snapshot.device_source()?;
        for ((_, out), fit) in slices.into_iter().zip(fits) {
            match &source {
                Some(source) => snapshot.read_all(&**source, fit.range, out).await?,
                None => copy_slowly(&snapshot.bytes_at(fit.tensor).unwrap_or_default(), out).await,
            }
        }
        Ok(())
    }
}

/// Copies between equal lengths, and lets others run meanwhile.
pub(crate) async fn copy_slowly(bytes: &[u8], out: &mut [u8]) {
    for (out, bytes) in out.chunks_mut(COPY_BYTES).zip(bytes.chunks(COPY_BYTES)) {
        out.copy_from_slice(bytes);
        tokio::task::yield_now().await;
    }
}

impl<B: AsMut<[u8]> + Send + 'static> Buffers<B> {
    /// Lends every buffer: to the one who fills them, and with the way back.
    pub(crate) fn lend(self) -> (Lent, Lender<B>) {
        let writing = Arc::new(Writing::default());
        let (mut tensors, mut owners) = (Vec::with_capacity(self.len()), Vec::with_capacity(self.len()));
        for (name, buffer) in self.by_name {
            let (region, owner) = Region::lent_by(buffer);
            tensors.push((name.clone(), region));
            owners.push((name, WayBack::Host(owner)));
        }
        let (memory, expected) = (LentMemory::Host(tensors), self.expected);
        let lent = Lent { memory, expected: Arc::clone(&expected), writing: Arc::clone(&writing) };
        (lent, Lender { owners, expected, writing })
    }
}

impl Buffers<DeviceBuffer> {
    /// The same for buffers on a device.
    pub(crate) fn lend_on_device(self) -> (Lent, Lender<DeviceBuffer>) {
        let writing = Arc::new(Writing::default());
        let (mut tensors, mut owners) = (Vec::with_capacity(self.len()), Vec::with_capacity(self.len()));
        for (name, buffer) in self.by_name {
            let (lodged, back) = Lodged::lent(buffer);
            tensors.push((name.clone(), lodged));
            owners.push((name, WayBack::Device(back)));
        }
        let (memory, expected) = (LentMemory::Device(tensors), self.expected);
        let lent = Lent { memory, expected: Arc::clone(&expected), writing: Arc::clone(&writing) };
        (lent, Lender { owners, expected, writing })
    }
}

/// Buffers on loan. They go back to their owner when this, and all that was made of it, is dropped.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) memory: LentMemory,
    pub(crate) expected: Arc<Expected>,
    pub(crate) writing: Arc<Writing>,
}

/// The buffers, by the name of the tensor that belongs there.
#[derive(Debug)]
pub(crate) enum LentMemory {
    /// In host memory.
    Host(Vec<(TensorName, Region)>),
    /// On a device.
    Device(Vec<(TensorName, Arc<Lodged>)>),
}

impl Lent {
    /// Gives those back at once that nothing is to be received into.
    pub(crate) fn retain_wanted(&mut self, selection: &Selection) {
        let wants = |name: &TensorName| self.expected.wants(selection, name.as_str());
        match &mut self.memory {
            LentMemory::Host(tensors) => tensors.retain(|(name, _)| wants(name)),
            LentMemory::Device(tensors) => tensors.retain(|(name, _)| wants(name)),
        }
    }

    /// The name and the length of each.
    pub(crate) fn asked(&self) -> Vec<(&str, u64)> {
        match &self.memory {
            LentMemory::Host(tensors) => tensors
                .iter()
                .map(|(name, region)| (name.as_str(), region.len() as u64))
                .collect(),
            LentMemory::Device(tensors) => {
                let asked = tensors
                    .iter()
                    .map(|(name, lodged)| (name.as_str(), lodged.buffer().len_bytes()));
                asked.collect()
            }
        }
    }
}

/// The way back of buffers on loan.
#[derive(Debug)]
pub(crate) struct Lender<B> {
    owners: Vec<(TensorName, WayBack<B>)>,
    expected: Arc<Expected>,
    writing: Arc<Writing>,
}

/// The way back of one buffer.
#[derive(Debug)]
enum WayBack<B> {
    /// Always, when nobody reaches its bytes any more.
    Host(GiveBack<B>),
    /// When no copy to it is in flight; never where nobody knows that.
    Device(oneshot::Receiver<B>),
}

impl<B> WayBack<B> {
    /// Mostly it is there already, and many that are shall not make anybody wait for their turns.
    fn try_take(&mut self) -> Option<B> {
        match self {
            Self::Host(owner) => owner.try_take(),
            Self::Device(back) => back.try_recv().ok(),
        }
    }

    /// Waits for it, on a device until `deadline`.
    async fn wait(&mut self, deadline: Instant) -> Option<B> {
        match self {
            Self::Host(owner) => owner.wait().await,
            // Its lender went without giving it back, and said so once already.
            Self::Device(back) if back.is_terminated() => None,
            Self::Device(back) => timeout_at(deadline, back).await.ok()?.ok(),
        }
    }
}

/// How long a device may take to end its copies to buffers that were lent, before they are not given back. Engines have
/// shorter deadlines of their own.
const COPIES_END: Duration = Duration::from_secs(30);

impl<B> Lender<B> {
    /// Waits until nothing of the buffers is lent any more, and gives them; and the names of those that do not come back.
    pub(crate) async fn back(mut self) -> (Buffers<B>, Vec<TensorName>) {
        let deadline = Instant::now() + COPIES_END;
        let (mut by_name, mut withheld) = (BTreeMap::new(), vec![]);
        for (name, owner) in &mut self.owners {
            let mut buffer = owner.try_take();
            if buffer.is_none() {
                buffer = owner.wait(deadline).await;
            }
            match buffer {
                Some(buffer) => drop(by_name.insert(name.clone(), buffer)),
                None => withheld.push(name.clone()),
            }
        }
        (Buffers { by_name, expected: self.expected }, withheld)
    }

    pub(crate) fn writing(&self) -> Arc<Writing> {
        Arc::clone(&self.writing)
    }
}

/// Which version's bytes were written to lent buffers first. Whoever takes them for more than torn must know more.
#[derive(Debug, Default)]
pub(crate) struct Writing(Mutex<Option<VersionId>>);

impl Writing {
    /// Bytes of `id` may be in the buffers from now on.
    pub(crate) fn begin(&self, id: &VersionId) {
        self.state().get_or_insert_with(|| id.clone());
    }

    /// What tore the buffers, if anything did and nothing whole has come over it.
    pub(crate) fn torn(&self) -> Option<VersionId> {
        self.state().clone()
    }

    fn state(&self) -> MutexGuard<'_, Option<VersionId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One buffer and the tensor that it fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The tensor's index in the manifest.
    pub(crate) tensor: usize,
    /// Where it lies among what is selected.
    pub(crate) range: Range<u64>,
}

/// Finds the tensor for each buffer, given as name and length: one that is there, selected, and of that length.
pub(crate) fn fit<'a>(
    selection: &Selection,
    asked: impl Iterator<Item = (&'a str, u64)>,
) -> Result<Vec<Fit>, BufferError> {
    let manifest = selection.manifest();
    let one = |(name, given_bytes): (&str, u64)| {
        let tensor = manifest
            .tensor_index(name)
            .ok_or_else(|| BufferError::NoSuchTensor { name: name.into() })?;
        let range = selection
            .tensor_range(tensor)
            .ok_or_else(|| BufferError::NotSelected { name: name.into() })?;
        let expected_bytes = range.end - range.start;
        match expected_bytes == given_bytes {
            true => Ok(Fit { tensor, range }),
            false => Err(BufferError::WrongSize { name: name.into(), expected_bytes, given_bytes }),
        }
    };
    asked.map(one).collect()
}

impl Expected {
    /// Whether the tensor called `name` is to be received into its buffer. Where it must be there, the buffer is judged.
    pub(crate) fn wants(&self, selection: &Selection, name: &str) -> bool {
        self.names != NameMatch::Common || place(selection, name).is_some()
    }

    /// Finds the tensor for each buffer, given as name and length, of those that are wanted.
    pub(crate) fn fit<'a>(
        &self,
        selection: &Selection,
        asked: impl Iterator<Item = (&'a str, u64)>,
    ) -> Result<Vec<Fit>, BufferError> {
        let fits = self.check(selection, asked)?;
        check_shared(selection, &fits)?;
        Ok(fits)
    }

    fn check<'a>(
        &self,
        selection: &Selection,
        asked: impl Iterator<Item = (&'a str, u64)>,
    ) -> Result<Vec<Fit>, BufferError> {
        let asked: Vec<_> = asked.filter(|(name, _)| self.wants(selection, name)).collect();
        self.check_names(selection, &asked)?;
        self.check_common(selection)?;
        // Before lengths, since it says why these differ.
        self.check_tensors(selection)?;
        let fits = fit(selection, asked.into_iter())?;
        self.check_tied(selection)?;
        Ok(fits)
    }

    /// Refuses a version that has nothing in common with the buffers, whose names are those of something else then.
    fn check_common(&self, selection: &Selection) -> Result<(), BufferError> {
        let manifest = selection.manifest();
        // A selection of nothing may be the names of the buffers.
        let is_common = |name: &TensorName| match selection.tensors().is_empty() {
            true => manifest.tensor_index(name.as_str()).is_some(),
            false => place(selection, name.as_str()).is_some(),
        };
        let is_checked = self.names == NameMatch::Common && !self.tensors.is_empty();
        if !is_checked || manifest.tensors().is_empty() || self.tensors.keys().any(is_common) {
            return Ok(());
        }
        let tensors = manifest.tensors().iter().map(|tensor| tensor.name.as_str().into());
        let buffers = self.tensors.keys().map(|name| name.as_str().into());
        Err(BufferError::NothingInCommon { tensors: tensors.collect(), buffers: buffers.collect() })
    }

    fn check_names(&self, selection: &Selection, asked: &[(&str, u64)]) -> Result<(), BufferError> {
        if self.names != NameMatch::Exact {
            return Ok(());
        }
        let tied = self.tied.keys().map(TensorName::as_str);
        let named: BTreeSet<&str> = asked.iter().map(|(name, _)| *name).chain(tied).collect();
        // A buffer serves all names that its tensor has.
        let start = |name: &str| {
            place(selection, name)
                .filter(|range| !range.is_empty())
                .map(|range| range.start)
        };
        let starts: HashSet<u64> = named.iter().filter_map(|name| start(name)).collect();
        let has_buffer =
            |name: &str| named.contains(name) || start(name).is_some_and(|start| starts.contains(&start));
        let tensors = selection.tensors().iter();
        let tensors = tensors.map(|index| selection.manifest().tensors()[index as usize].name.as_str());
        let missing: Vec<Box<str>> = tensors.filter(|name| !has_buffer(name)).map(Box::from).collect();
        let unexpected = named.iter().filter(|name| place(selection, name).is_none());
        let unexpected: Vec<Box<str>> = unexpected.map(|name| Box::from(*name)).collect();
        match missing.is_empty() && unexpected.is_empty() {
            true => Ok(()),
            false => Err(BufferError::OtherNames { missing: missing.into(), unexpected: unexpected.into() }),
        }
    }

    /// Refuses a version that has tensors of another dtype or shape.
    fn check_tensors(&self, selection: &Selection) -> Result<(), BufferError> {
        for (name, (dtype, shape)) in &self.tensors {
            // A buffer for a tensor that is not there is refused with the buffer.
            let Some(tensor) = selection.manifest().tensor(name.as_str()) else { continue };
            if (tensor.dtype, &tensor.shape) != (*dtype, shape) {
                return Err(BufferError::OtherTensor {
                    name: name.as_str().into(),
                    expected: format!("{dtype} {shape}").into(),
                    found: format!("{} {}", tensor.dtype, tensor.shape).into(),
                });
            }
        }
        Ok(())
    }

    /// Refuses a version in which names are two tensors that have one buffer.
    fn check_tied(&self, selection: &Selection) -> Result<(), BufferError> {
        for (name, to) in &self.tied {
            if !self.wants(selection, name.as_str()) || !self.wants(selection, to.as_str()) {
                continue;
            }
            let places = (place(selection, name.as_str()), place(selection, to.as_str()));
            if places.0.is_none() || places.0 != places.1 {
                return Err(BufferError::NotTied { name: name.as_str().into(), to: to.as_str().into() });
            }
        }
        Ok(())
    }
}

/// Where the tensor called `name` lies among what is selected, if it is.
fn place(selection: &Selection, name: &str) -> Option<Range<u64>> {
    selection.tensor_range(selection.manifest().tensor_index(name)?)
}

/// Refuses two buffers for tensors that are one (tied weights): no byte can be received to two places.
pub(crate) fn check_shared(selection: &Selection, fits: &[Fit]) -> Result<(), BufferError> {
    let name = |fit: &Fit| selection.manifest().tensors()[fit.tensor].name.as_str().into();
    let mut taken: HashMap<u64, &Fit> = HashMap::new();
    for fit in fits.iter().filter(|fit| !fit.range.is_empty()) {
        if let Some(other) = taken.insert(fit.range.start, fit) {
            return Err(BufferError::Shared { name: name(fit), other: name(other) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Limits, Manifest, TensorSpec};

    fn name(name: &str) -> TensorName {
        TensorName::new(name).unwrap()
    }

    fn spec(tensor: &str, bytes: u64) -> TensorSpec {
        TensorSpec::new(name(tensor), Dtype::U8, Shape::new(&[bytes]).unwrap())
    }

    /// `a`, `b`, its alias `tied`, and `none` without bytes.
    fn manifest() -> Arc<Manifest> {
        let tied = TensorSpec { alias_of: Some(1), ..spec("tied", 1000) };
        let specs = vec![spec("a", 10), spec("b", 1000), tied, spec("none", 0)];
        Arc::new(Manifest::layout(specs, vec![], 256, &Limits::default()).unwrap())
    }

    fn fits(selection: &Selection, asked: &[(&str, u64)]) -> Result<Vec<Fit>, BufferError> {
        let fits = fit(selection, asked.iter().copied())?;
        check_shared(selection, &fits).map(|()| fits)
    }

    #[test]
    fn a_buffer_must_fit_a_selected_tensor_exactly() {
        let all = Selection::all(manifest());
        assert_eq!(fits(&all, &[("b", 1000), ("a", 10), ("none", 0)]).unwrap().len(), 3);
        let error = fits(&all, &[("a", 10), ("b", 999)]).unwrap_err();
        let expected = BufferError::WrongSize { name: "b".into(), expected_bytes: 1000, given_bytes: 999 };
        assert_eq!(error, expected);
        assert_eq!(fits(&all, &[("c", 1)]).unwrap_err(), BufferError::NoSuchTensor { name: "c".into() });
        let some = Selection::new(manifest(), &[Glob::new("a").unwrap()]);
        assert_eq!(fits(&some, &[("b", 1000)]).unwrap_err(), BufferError::NotSelected { name: "b".into() });
    }

    #[test]
    fn what_is_expected_of_a_tensor_is_more_than_its_length() {
        let all = Selection::all(manifest());
        let expecting = |tensor: &str, dtype, shape: &[u64]| {
            let mut buffers: Buffers<Vec<u8>> = Buffers::new();
            buffers.expect(name(tensor), dtype, Shape::new(shape).unwrap());
            buffers.expected.check_tensors(&all)
        };
        assert_eq!(expecting("b", Dtype::U8, &[1000]), Ok(()));
        assert_eq!(expecting("c", Dtype::U8, &[1]), Ok(()), "what is missing is told otherwise");
        for (dtype, shape) in [(Dtype::U8, &[10, 100][..]), (Dtype::I8, &[1000])] {
            let error = expecting("b", dtype, shape).unwrap_err();
            assert!(matches!(&error, BufferError::OtherTensor { name, .. } if &**name == "b"), "{error}");
        }
    }

    #[test]
    fn tied_weights_have_one_buffer() {
        let all = Selection::all(manifest());
        assert!(fits(&all, &[("tied", 1000)]).is_ok());
        let error = fits(&all, &[("b", 1000), ("tied", 1000)]).unwrap_err();
        assert_eq!(error, BufferError::Shared { name: "tied".into(), other: "b".into() });
    }

    #[test]
    fn names_match_as_strictly_as_is_wished() {
        let all = Selection::all(manifest());
        let matched = |names, buffers: &[(&str, u64)]| {
            let mut expected = Expected { names, ..Expected::default() };
            expected
                .tied
                .extend(buffers.contains(&("b", 1000)).then(|| (name("tied"), name("b"))));
            expected.check(&all, buffers.iter().copied()).map(|fits| fits.len())
        };
        let whole = [("a", 10), ("b", 1000), ("none", 0)];
        assert_eq!(matched(NameMatch::Exact, &whole), Ok(3));
        assert_eq!(matched(NameMatch::Exact, &[("a", 10), ("tied", 1000), ("none", 0)]), Ok(3), "b is tied");
        let error = matched(NameMatch::Exact, &[("b", 1000), ("c", 1)]).unwrap_err();
        let (missing, unexpected) = (["a".into(), "none".into()].into(), ["c".into()].into());
        assert_eq!(error, BufferError::OtherNames { missing, unexpected });
        assert_eq!(matched(NameMatch::Buffers, &whole[..1]), Ok(1));
        assert!(matched(NameMatch::Buffers, &[("c", 1)]).is_err());
        assert_eq!(matched(NameMatch::Common, &[("b", 1000), ("c", 1)]), Ok(1));
        assert!(matched(NameMatch::Common, &[("b", 999), ("c", 1)]).is_err(), "what both have must fit");
    }

    #[test]
    fn one_buffer_for_two_names_needs_tied_tensors() {
        let all = Selection::all(manifest());
        let tied = |one: &str, to: &str| {
            let mut buffers: Buffers<u64> = Buffers::new();
            buffers.expect_tied(name(one), name(to));
            buffers.expected.check_tied(&all)
        };
        assert_eq!(tied("tied", "b"), Ok(()));
        for (one, to) in [("a", "b"), ("c", "b")] {
            assert_eq!(tied(one, to), Err(BufferError::NotTied { name: one.into(), to: to.into() }));
        }
    }

    #[test]
    fn buffers_select_themselves_where_a_selection_holds_their_names() {
        let named = |count| {
            (0..count)
                .map(|i| (name(&format!("t{i}*")), vec![]))
                .collect::<Buffers<Vec<u8>>>()
        };
        let globs = named(64).selection();
        assert_eq!(globs.len(), 64);
        assert!(globs.iter().any(|glob| glob.matches("t7*")), "a name is matched by itself");
        assert!(named(65).selection().is_empty());
        let long = (0..40).map(|i| (name(&format!("{i}{}", "x".repeat(250))), vec![]));
        assert!(long.collect::<Buffers<Vec<u8>>>().selection().is_empty());
    }

    #[tokio::test]
    async fn buffers_come_back_with_what_was_written_and_without_a_copy() {
        let buffers: Buffers<Vec<u8>> = [(name("a"), vec![0; 4]), (name("b"), vec![])].into_iter().collect();
        let address = buffers.get("a").unwrap().as_ptr();
        let (mut lent, lender) = buffers.lend();
        let LentMemory::Host(tensors) = &mut lent.memory else { panic!("they are on the host") };
        tensors[0].1.copy_from_slice(&[1, 2, 3, 4]);
        drop(lent);
        let (buffers, withheld) = lender.back().await;
        assert!(withheld.is_empty());
        assert_eq!(buffers.get("a").unwrap(), &[1, 2, 3, 4]);
        assert_eq!((buffers.get("a").unwrap().as_ptr(), buffers.len()), (address, 2));
    }
}
