-- Nothing yet.
DO $$ BEGIN END $$;
