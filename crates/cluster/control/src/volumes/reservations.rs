//! Persistent reservations, for administrators: showing them, and clearing those of a dead host.

use api::{ApiError, Registration, Reservations, VolumeName};
use reservation::{Initiator, ItNexus, ReservationType, Table};

use super::VolumeControl;
use crate::errors::backing_error;

impl VolumeControl {
    /// Returns the reservations of a volume. The node must serve it.
    ///
    /// # Errors
    /// [`NotFound`](api::ErrorCode::NotFound); [`Backing`](api::ErrorCode::Backing) if this node
    /// does not serve it now.
    pub async fn reservations(&self, name: &VolumeName) -> Result<Reservations, ApiError> {
        let id = self.volume_id(name)?;
        let table = self.0.context.engine.reservations(id).await;
        Ok(reservations_info(&table.map_err(|e| backing_error(name, &e))?))
    }

    /// Removes all reservations and registrations of a volume.
    ///
    /// # Errors
    /// As [`Self::reservations`].
    pub async fn clear_reservations(&self, name: &VolumeName) -> Result<Reservations, ApiError> {
        let id = self.volume_id(name)?;
        tracing::warn!(volume = %name, "reservations cleared by an operator");
        let cleared = self.0.context.engine.clear_reservations(id).await;
        cleared.map_err(|e| backing_error(name, &e))?;
        self.reservations(name).await
    }
}

fn reservations_info(table: &Table) -> Reservations {
    let registration = |r: &reservation::Registrant| Registration {
        initiator: party_name(&r.nexus),
        relative_port_id: r.nexus.port,
        key: format!("{:016x}", r.key),
        holder: table.is_holder(&r.nexus),
    };
    Reservations {
        reservation_type: table
            .reservation
            .as_ref()
            .map(|reservation| kind_label(reservation.kind).to_owned()),
        registrations: table.registrants().iter().map(registration).collect(),
        aptpl: table.persist,
        spc2_holder: table.spc2_reservation.as_ref().map(|sole| party_name(&sole.nexus)),
    }
}

fn party_name(party: &ItNexus) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    match &party.initiator {
        Initiator::Iscsi { name, isid } => format!("{name},i,0x{}", hex(isid)),
        Initiator::Host(id) => format!("NVMe host {}", hex(id)),
    }
}

fn kind_label(kind: ReservationType) -> &'static str {
    match kind {
        ReservationType::WriteExclusive => "write exclusive",
        ReservationType::ExclusiveAccess => "exclusive access",
        ReservationType::WriteExclusiveRegistrantsOnly => "write exclusive, registrants only",
        ReservationType::ExclusiveAccessRegistrantsOnly => "exclusive access, registrants only",
        ReservationType::WriteExclusiveAllRegistrants => "write exclusive, all registrants",
        ReservationType::ExclusiveAccessAllRegistrants => "exclusive access, all registrants",
    }
}

#[cfg(test)]
mod tests {
    use reservation::Change;

    use super::*;

    #[test]
    fn who_has_reserved_what_is_told() {
        let initiator = Initiator::Iscsi { name: "iqn.a".into(), isid: [1, 2, 3, 4, 5, 0xff] };
        let iscsi = ItNexus { initiator, port: 2 };
        let host = ItNexus { initiator: Initiator::Host([0x1a; 16]), port: 0 };
        let register = |new_key| Change::Register {
            key: 0,
            new_key,
            ignore_key: false,
            persist: true,
            ports: vec![],
            other_initiators: vec![],
        };
        let ask =
            |table: &Table, by, change: &Change| table.with_change(by, 1, change).unwrap().unwrap();
        let table = ask(&Table::default(), &iscsi, &register(0xab));
        let table = ask(&table, &host, &register(7));
        let kind = ReservationType::WriteExclusiveRegistrantsOnly;
        let told = reservations_info(&ask(&table, &iscsi, &Change::Reserve { key: 0xab, kind }));
        assert_eq!(told.reservation_type.as_deref(), Some("write exclusive, registrants only"));
        assert!(told.aptpl && told.spc2_holder.is_none());
        let [first, second] = &told.registrations[..] else { panic!("{told:?}") };
        assert_eq!(
            (first.initiator.as_str(), first.relative_port_id, first.key.as_str(), first.holder),
            ("iqn.a,i,0x0102030405ff", 2, "00000000000000ab", true)
        );
        assert!(second.initiator.starts_with("NVMe host 1a1a") && !second.holder);
    }
}
