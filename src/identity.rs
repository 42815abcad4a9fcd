//! Which shared object something belongs to, compared without a look at the object.

use std::sync::Arc;

/// An object that several hold. Equal to another only if both are of one object, or of none, as
/// long as somebody holds the object at each end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity(usize);

impl Identity {
    /// Of no object.
    #[cfg(any(all(test, not(loom)), feature = "bench"))]
    pub(crate) const NONE: Identity = Identity(0);

    #[inline(always)]
    pub(crate) fn of<T>(object: &Arc<T>) -> Identity {
        Identity(Arc::as_ptr(object).addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_one_object() {
        let (one, other) = (Arc::new(7), Arc::new(7));
        assert_eq!(Identity::of(&one), Identity::of(&one.clone()));
        assert_ne!(Identity::of(&one), Identity::of(&other));
        assert_ne!(Identity::of(&one), Identity::default());
    }
}
