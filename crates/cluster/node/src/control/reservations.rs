//! What initiators have reserved, for administrators: to look at, and to take away what a dead host has
//! left.

use api::{ApiError, Registration, Reservations, VolumeName};
use reservation::{Initiator, Kind, Party, Table};

use super::{Control, backing_error};

impl Control {
    /// The reservations of a volume. To be asked at a node that serves it.
    ///
    /// # Errors
    /// [`NotFound`](api::Code::NotFound); [`Backing`](api::Code::Backing) if this node does not serve it now.
    pub async fn reservations(&self, name: &VolumeName) -> Result<Reservations, ApiError> {
        let id = self.find(name)?;
        let table = self.0.engine.reservations(id).await;
        Ok(told(&table.map_err(|e| backing_error(name, &e))?))
    }

    /// Takes all reservations and registrations of a volume away.
    ///
    /// # Errors
    /// As [`Self::reservations`].
    pub async fn clear_reservations(&self, name: &VolumeName) -> Result<Reservations, ApiError> {
        let id = self.find(name)?;
        tracing::warn!(volume = %name, "an operator takes all reservations away");
        let cleared = self.0.engine.clear_reservations(id).await;
        cleared.map_err(|e| backing_error(name, &e))?;
        self.reservations(name).await
    }
}

fn told(table: &Table) -> Reservations {
    let registration = |r: &reservation::Registrant| Registration {
        initiator: name_of(&r.party),
        port: r.party.port,
        key: format!("{:016x}", r.key),
        holds: table.holds(&r.party),
    };
    Reservations {
        kind: table.reservation.as_ref().map(|held| kind(held.kind).to_owned()),
        registrations: table.registrants().iter().map(registration).collect(),
        persists: table.persists,
        reserved_by: table.sole.as_ref().map(|sole| name_of(&sole.party)),
    }
}

fn name_of(party: &Party) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    match &party.initiator {
        Initiator::Iscsi { name, isid } => format!("{name},i,0x{}", hex(isid)),
        Initiator::Host(id) => format!("NVMe host {}", hex(id)),
    }
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::WriteExclusive => "write exclusive",
        Kind::ExclusiveAccess => "exclusive access",
        Kind::WriteExclusiveRegistrants => "write exclusive, registrants only",
        Kind::ExclusiveAccessRegistrants => "exclusive access, registrants only",
        Kind::WriteExclusiveAll => "write exclusive, all registrants",
        Kind::ExclusiveAccessAll => "exclusive access, all registrants",
    }
}

#[cfg(test)]
mod tests {
    use reservation::Change;

    use super::*;

    #[test]
    fn who_has_reserved_what_is_told() {
        let initiator = Initiator::Iscsi { name: "iqn.a".into(), isid: [1, 2, 3, 4, 5, 0xff] };
        let iscsi = Party { initiator, port: 2 };
        let host = Party { initiator: Initiator::Host([0x1a; 16]), port: 0 };
        let register = |new_key| Change::Register {
            key: 0,
            new_key,
            ignore_key: false,
            persists: true,
            ports: vec![],
            also: vec![],
        };
        let ask =
            |table: &Table, by, change: &Change| table.change(by, 1, change).unwrap().unwrap();
        let table = ask(&Table::default(), &iscsi, &register(0xab));
        let table = ask(&table, &host, &register(7));
        let kind = Kind::WriteExclusiveRegistrants;
        let told = told(&ask(&table, &iscsi, &Change::Reserve { key: 0xab, kind }));
        assert_eq!(told.kind.as_deref(), Some("write exclusive, registrants only"));
        assert!(told.persists && told.reserved_by.is_none());
        let [first, second] = &told.registrations[..] else { panic!("{told:?}") };
        assert_eq!(
            (first.initiator.as_str(), first.port, first.key.as_str(), first.holds),
            ("iqn.a,i,0x0102030405ff", 2, "00000000000000ab", true)
        );
        assert!(second.initiator.starts_with("NVMe host 1a1a") && !second.holds);
    }
}
